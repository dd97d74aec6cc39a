"""Settings of the whole suite: one thread per process, and GPU tests are skipped with a reason without a GPU."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import pkgutil
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Set before torch is imported anywhere: the suite runs one process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The suite itself compares the kernels with float64, in more cases.
os.environ.setdefault("LONGSEQ_SELF_TEST", "0")
# The results of operations on fake tensors are cheap here; caching them costs torch more.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Data workers read data sets that tests define, and only a fork knows the modules of tests.
if sys.platform == "linux":
    multiprocessing.set_start_method("fork")

gc.disable()  # until the collection is over: nearly everything that it makes stays to the end

import pytest  # noqa: E402
import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()

# Tests of these kinds are never fast.
NEVER_FAST = ("gpu", "oracle", "clients", "soak", "slow")
# Tests with a fast case for each operation or mixer, which one of these parameters names.
SUBJECTS = ("op", "mixer", "name")
ABOUT_EACH = (
    "test_forms_equal_the_recurrence",
    "test_packed_equals_each_alone",
    "test_reverse_reads_from_the_end",
    "test_the_torch_form_is_the_formula",
    "test_kernel_equals_the_recurrence",
    "test_every_mixer_keeps_every_law",
)

# Tests of half a minute come first, so that no process waits for one of them at the end.
LONG = (
    "tests/test_style.py",
    "tests/plugins/",
    "tests/kernels/test_compilations.py",
    "tests/test_docs.py",
    "tests/test_plain_install.py",
)


def prepare() -> None:
    """Import torch's companions in the order that the tests need."""
    torch.set_num_threads(1)
    if not HAS_GPU:
        import_interpreted_kernels()
        # Autograd starts a thread for each GPU that torch counts, and a fork of a process with such threads cannot
        # differentiate. Start it before a test pretends that there is a GPU.
        torch.ones((), requires_grad=True).backward()
    from longseq.tools.deferred_metrics import defer_torchmetrics

    defer_torchmetrics()


def import_interpreted_kernels() -> None:
    """Import Triton and all our kernels for the interpreter, which Triton decides when it creates a kernel.

    `auto` chooses interpreted kernels only in tests that set TRITON_INTERPRET.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kernels = importlib.import_module("longseq.kernels")
        for module in pkgutil.walk_packages(kernels.__path__, "longseq.kernels."):
            if module.name.rpartition(".")[2].startswith("triton_"):
                importlib.import_module(module.name)


prepare()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    mark_fast(items)
    if not HAS_GPU:
        skip_gpu_tests(config, items)


def pytest_collection_finish() -> None:
    """Keep what imports and the collection have made out of garbage collection, a tenth of the suite's time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries complain of objects that outlive them
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


def mark_fast(items: list[pytest.Item]) -> None:
    """Mark one case of each test as fast, unless it is slow; of ABOUT_EACH, one for each operation or mixer."""
    from longseq import kernels, mixers
    from longseq.kernels import dispatch

    subjects = {*mixers.mixer_names(), *kernels.list_ops(), *dispatch.list_ops("local")}
    seen: set[tuple[Any, ...]] = set()
    for item in items:
        if not isinstance(item, pytest.Function) or any(map(item.get_closest_marker, NEVER_FAST)):
            continue
        case: tuple[Any, ...] = (item.path, item.originalname)
        if item.originalname in ABOUT_EACH:
            values = item.callspec.params if hasattr(item, "callspec") else {}
            case += tuple(values[name] for name in SUBJECTS if values.get(name) in subjects)
        if case not in seen:
            seen.add(case)
            item.add_marker("fast")


def skip_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU. The first case of each test reports the number of its cases. `-m gpu` is an error."""
    if config.option.markexpr.startswith("gpu"):
        raise pytest.UsageError("the GPU tests need a CUDA device, and torch sees none")
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for first, *others in cases.values():
        count = f" (this and {len(others)} more cases)" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"needs a CUDA device, and torch sees none{count}"))
    dropped = {item for _, *others in cases.values() for item in others}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(autouse=True)
def fresh_choice_of_backends() -> None:
    """Forget the backends that earlier tests chose: tests change what determines the choice."""
    from longseq.kernels.operation import forget

    forget()


@pytest.fixture
def own_mixers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixers that a test registers are gone after it."""
    from longseq.mixers import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


@pytest.fixture
def command_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `longseq` in this process, in a folder: seconds faster, for tests that do not need a new process."""
    from hydra.core.hydra_config import HydraConfig

    from longseq.tools import cli

    script = Path(sys.executable).with_name("longseq")  # further processes of a command run it again

    def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as in a new process
        try:
            code = cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, output, errors)

    return call


@pytest.fixture
def little_room() -> Iterator[None]:
    """Limit files to 64 KiB; writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a `StepGraph` run on a CPU what a CUDA graph would have recorded."""
    from longseq.backbones import generation

    def record(graph: Any) -> None:
        graph.graph = SimpleNamespace(replay=graph._advance)

    monkeypatch.setattr(generation.StepGraph, "_record", record)
