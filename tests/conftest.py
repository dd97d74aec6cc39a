"""Settings of the whole suite: one thread per process, and GPU tests are skipped with a reason without a GPU."""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Set before torch is imported anywhere: the suite runs one process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The suite itself compares the kernels with float64, in more cases.
os.environ.setdefault("LONGSEQ_SELF_TEST", "0")
# What an operation on tensors without values gives is soon computed again; to keep it takes torch longer.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Tests give data workers data sets of their own. A worker that is no fork, as from Python 3.14 on, cannot import
# modules of tests, which pytest imports by their paths. Commands in their own processes start workers as Python does.
if sys.platform == "linux":
    multiprocessing.set_start_method("fork")

import forked  # noqa: F401  (notes the filters of warnings before pytest changes them)
import pytest

gc.disable()  # until the collection is over: nearly all that it makes stays to the end


@functools.cache
def prepare() -> None:
    """Import torch and what stands between it and the tests."""
    import configurations
    import emulation
    import torch
    import tracing

    from longseq.tools.deferred_metrics import defer_torchmetrics

    defer_torchmetrics()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        emulation.import_triton()  # before another conftest.py imports it
    tracing.leave_out_stack_traces()
    tracing.register_onnx_functions_once()
    tracing.find_operators_once()
    tracing.find_no_gpu_once()
    tracing.differentiate_without_threads()
    tracing.read_programs_faster()
    configurations.share_work()


def has_workers() -> bool:
    """True if this process seems to hand out the tests to others, who begin when it has read this file."""
    numbers = re.findall(r" -n[ =]?(\w+)", " ".join(sys.argv))
    return "PYTEST_XDIST_WORKER" not in os.environ and bool(numbers) and numbers[-1] != "0"


if not has_workers():
    prepare()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    if not session.config.pluginmanager.has_plugin("dsession"):  # which hands out tests
        prepare()


# In a run of only the fast tests, a test that takes more CPU seconds than this fails, so that it gets marked as slow. A
# test that takes a tenth of it may have to import torch's compiler first.
LONGEST_FAST = 5.0

# The fast cases of the whole suite: file, name of the test, and operation or mixer.
FAST_CASES = pytest.StashKey[set[tuple[str, ...]]]()

# Tests of these kinds are never fast.
APART = ("gpu", "oracle", "soak", "compilations", "slow")
# The parameters that hold an operation's or a mixer's name, and the tests that are about each of them.
SUBJECTS = ("op", "mixer", "name")
ABOUT_EACH = (
    "tests/kernels/test_contracts.py::test_forms_equal_the_recurrence",
    "tests/kernels/test_contracts.py::test_packed_equals_each_alone",
    "tests/kernels/test_contracts.py::test_reverse_reads_from_the_end",
    "tests/kernels/test_local.py::test_the_torch_form_is_the_formula",
    "tests/kernels/test_triton.py::test_kernel_equals_the_recurrence",
    "tests/mixers/test_contract.py::test_every_mixer_keeps_every_law",
    "tests/test_frozen_models.py",
)


# Tests of half a minute: they come first, so that at the end no process of several waits for one of them.
LONG = (
    "tests/test_style.py",
    "tests/plugins/",
    "tests/kernels/test_compilations.py",
    "tests/kernels/test_front_end.py",
    "tests/test_docs.py",
)


def relative_path(item: pytest.Item) -> str:
    return item.path.relative_to(item.config.rootpath).as_posix()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=lambda item: not relative_path(item).startswith(LONG))
    config.stash[FAST_CASES] = mark_fast(items)
    if not torch.cuda.is_available():
        skip_gpu_tests(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector leaves alone what imports and the collection have made, which is there to the end.

    It runs more rarely, too. Both save a tenth of the suite's processor time. When pytest has ended, which collects
    garbage five times, all is freed: some libraries complain of objects that outlive them.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def leave_alone_what_stays() -> Iterator[None]:
    """The garbage collector also leaves alone what the imports and the caches of earlier files have made.

    Some libraries collect all garbage again and again, which takes a third of a second among all that was made.
    """
    yield
    gc.collect()
    gc.freeze()


def mark_fast(items: list[pytest.Item]) -> set[tuple[str, ...]]:
    """Mark as fast one case of each test, unless the test is slow; of ABOUT_EACH, one for each operation or mixer."""
    from longseq import mixers
    from longseq.kernels import dispatch, list_ops

    subjects = {*mixers.mixer_names(), *list_ops(), *dispatch.list_local_ops()}
    fast: set[tuple[str, ...]] = set()
    for item in items:
        if isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, APART)):
            values = item.callspec.params if hasattr(item, "callspec") else {}
            file = relative_path(item)
            names = [values[name] for name in SUBJECTS if str(values.get(name)) in subjects]
            about_each = f"{file}::{item.originalname}".startswith(ABOUT_EACH)
            case = (file, item.originalname, *(names if about_each else ()))
            if case not in fast:
                fast.add(case)
                item.add_marker("fast")
    return fast


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    before = processor_seconds()
    result = yield
    taken = processor_seconds() - before
    if item.config.option.markexpr == "fast" and taken > LONGEST_FAST:
        pytest.fail(f"this test took {taken:.1f} s of a processor: mark it with pytest.mark.slow")
    return result


def processor_seconds() -> float:
    """The CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@pytest.fixture(scope="session")
def fast_cases(request: pytest.FixtureRequest) -> set[tuple[str, ...]]:
    """The fast cases of the suite, if the whole suite was collected."""
    if request.config.args != request.config.getini("testpaths"):
        pytest.skip("a part of the suite was collected, and this test is about the whole")
    return request.config.stash[FAST_CASES]


def skip_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU; the first case of each test stands for all its cases, whose number it names."""
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
def choices_of_this_test() -> None:
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
    """No file may have more than 64 KiB, which the system refuses as it refuses a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a `StepGraph` run on a CPU what a CUDA graph would have recorded."""
    from types import SimpleNamespace

    from longseq.backbones import step_graph

    def record(graph: Any) -> None:
        graph.graph = SimpleNamespace(replay=graph._advance)

    monkeypatch.setattr(step_graph.StepGraph, "_record", record)
