"""`longseq benchmark tune`: the launches of an operation's Triton kernels, measured on this GPU.

From the launches in the operation's table, one constant of one kernel is changed at a time, and the change is kept if
the result is right and forward and backward get faster; this is repeated until nothing helps. The winners are written
to a file that LONGSEQ_LAUNCHES names for the kernels (see `longseq.kernels.launch_file`).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor

from longseq import kernels
from longseq.kernels.launch_file import LAUNCHES_VARIABLE, read_launches
from longseq.kernels.self_test import SELF_TEST_VARIABLE
from longseq.tools.benchmark.gate import Gate, call_op, options_of, tensors_of
from longseq.tools.benchmark.measure import environment, time_in_turn
from longseq.tools.benchmark.report import (
    check_list,
    check_output,
    find_device,
    find_dtypes,
    is_emulated,
    make_result,
)
from longseq.tools.benchmark.work import TINY, Work, choose_work

# A change must gain this much: less is noise, and the table is to be the same for whoever measures again.
GAIN = 0.99
CHOICES = {
    "block": (16, 32, 64, 128, 256),
    "step": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
    "registers": (None, 128, 168),
}


class Place(NamedTuple):
    """Where a launch stands in the table of an operation."""

    bytes: int
    width: int
    kernel: str


def run(cfg: DictConfig) -> dict[str, Any]:
    """Tune what `benchmark_tune.yaml` asks for, and write the launches with every candidate's row."""
    device = find_device(cfg.device)
    asked: Any = OmegaConf.to_container(cfg, resolve=True)
    if device.type != "cuda" and not is_emulated():
        raise ValueError(f"device={device} runs no Triton kernels: tune on a CUDA device")
    if os.environ.get(LAUNCHES_VARIABLE):
        raise ValueError(f"{LAUNCHES_VARIABLE} replaces the table that tuning starts from: unset it")
    module = find_module(cfg.op)
    work = choose_shapes(cfg.op, asked["shapes"], device)
    dtypes = find_dtypes(asked["dtypes"])
    if asked["kernels"] is not None:
        known = {name for launches in module.LAUNCHES.values() for name in launches}
        check_list("kernels", asked["kernels"], sorted(known))
    held = start_file(check_output(cfg.output), cfg.op, device)
    others = held["launches"]
    tuned: dict[Place, Any] = {}
    with environment({SELF_TEST_VARIABLE: "0"}):  # every candidate is compared with float64
        for dtype in dtypes:
            trials = [Trial(module, item, dtype, device, asked["seconds"]) for item in work]
            for place, launch, row in tune(module, trials, asked["kernels"]):
                Console().print(json.dumps(row), markup=False, highlight=False, soft_wrap=True)
                tuned[place] = launch
                held["rows"].append(row)
                best = [{"op": cfg.op, **at._asdict(), "launch": launch._asdict()} for at, launch in tuned.items()]
                held["launches"] = [*others, *best]
                # After every candidate: one that crashes takes no other with it.
                Path(cfg.output).write_text(json.dumps(held, indent=2) + "\n")
    if not tuned:
        raise ValueError(f"kernels={asked['kernels']}: no shape that was tried launches any of them, name other shapes")
    print(f"written: {cfg.output}; kernels take their launches from it where {LAUNCHES_VARIABLE} names it")
    return held


def start_file(file: Path, op: str, device: torch.device) -> dict[str, Any]:
    """What the file holds before the first candidate: circumstances, and the launches of other operations."""
    found = make_result(f"Launches of {op}", [], device)
    capability = list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    kept: dict[str, Any] = {"launches": [], "rows": []}
    if file.exists():
        kept = read_launches(file)
        if kept["capability"] != capability:
            raise ValueError(f"output={file} holds launches of a GPU of capability {kept['capability']}: name another")
    file.parent.mkdir(parents=True, exist_ok=True)
    return {
        "gpu": found["device"] if capability else f"{found['device']}, Triton emulated",
        "capability": capability,
        **{name: found[name] for name in ("command", "versions", "date")},
        **{name: [row for row in kept.get(name, []) if row["op"] != op] for name in ("launches", "rows")},
    }


def choose_shapes(op: str, shapes: Any, device: torch.device) -> list[Work]:
    """The calls to tune on. Raises ValueError, with an example, for an operation that needs to be given some."""
    try:
        return choose_work(shapes, [op], device)
    except ValueError as error:
        if shapes is not None:
            raise
        sizes = next(item.sizes for item in TINY if item.op == op)
        example = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(f"{error}, such as shapes=[{{op: {op}, {example}}}]") from None


def find_module(op: str) -> ModuleType:
    """The module with an operation's table of launches."""
    tables = find_tables()
    if op not in tables:
        raise ValueError(f"op={op} has no table of launches of its own: choose one of {', '.join(sorted(tables))}")
    return tables[op]


def find_tables() -> dict[str, ModuleType]:
    """The modules with a table of launches, by operation."""
    tables = {}
    folder = Path(kernels.__file__).parent
    for package in pkgutil.iter_modules([str(folder)]):
        for found in pkgutil.iter_modules([str(folder / package.name)]) if package.ispkg else ():
            if found.name.startswith("triton_"):
                module = importlib.import_module(f"longseq.kernels.{package.name}.{found.name}")
                if hasattr(module, "LAUNCHES"):
                    tables[package.name] = module
    return tables


class _Watched(dict[Any, Any]):
    """A table that remembers which of its entries were asked for."""

    def __init__(self, entries: Any) -> None:
        super().__init__(entries)
        self.read: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def find_places(module: Any, call: Callable[[], Any]) -> list[Place]:
    """The launches that a call takes from the table, in the table's order."""
    table = module.LAUNCHES
    module.LAUNCHES = watched = _Watched({key: _Watched(launches) for key, launches in table.items()})
    try:
        call()
    finally:
        module.LAUNCHES = table
    return [
        Place(key[0], key[1], kernel)
        for key, launches in table.items()
        if key in watched.read
        for kernel in launches
        if kernel in dict.__getitem__(watched, key).read
    ]


def propose(launch: Any) -> Iterator[Any]:
    """Launches that differ from this one in one constant, by one place in its list of choices."""
    for constant, choices in CHOICES.items():
        value = getattr(launch, constant)
        if value == 0:
            continue  # the kernel has no such block
        at = choices.index(value) if value in choices else None
        for index, choice in enumerate(choices):
            if at is None or abs(index - at) == 1:
                yield launch._replace(**{constant: choice})


class Trial:
    """One shape that candidates are compared and timed on."""

    def __init__(self, module: Any, work: Work, dtype: torch.dtype, device: torch.device, seconds: float) -> None:
        self.work, self.dtype, self.device, self.seconds = work, dtype, device, seconds
        self.gate = Gate(work, dtype, device)
        inputs = work.make(dtype, device)
        self.function = call_op(inputs, options_of(inputs, work), "triton")
        self.leaves = {name: x.requires_grad_(x.is_floating_point()) for name, x in tensors_of(inputs).items()}
        verdict = self.gate.judge_backend("triton")
        if not verdict.passed:
            raise ValueError(f"{work.op} {work.shape} cannot be tuned, as it is {verdict.words}")
        self.places = find_places(module, self.call)
        self.best = self.measure()
        if math.isinf(self.best):
            raise ValueError(f"{work.op} {work.shape} cannot be tuned, as it fails at full size")

    def call(self) -> tuple[Tensor, ...]:
        """Forward and backward at full size."""
        outputs = self.function(self.leaves)
        wanted = [x for x in self.leaves.values() if x.requires_grad]
        return torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])

    def measure(self) -> float:
        """The median milliseconds; infinite for a call that fails."""
        times = time_in_turn({"call": self.call}, self.device, self.seconds)["call"].times
        return math.inf if times is None else times.median

    def judge(self) -> tuple[float, str]:
        """Milliseconds, infinite for what is wrong, and what float64 says."""
        verdict = self.gate.judge_backend("triton")
        return (self.measure() if verdict.passed else math.inf), verdict.words


def tune(
    module: Any, trials: list[Trial], only: list[str] | None = None
) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    """Yield for every candidate the place that it was tried at, the best launch there so far, and its row.

    A candidate is judged by all shapes whose calls take their launch from that place: by the geometric mean of their
    times.
    """
    for place in dict.fromkeys(place for trial in trials for place in trial.places):
        if only and place.kernel not in only:
            continue
        users = [trial for trial in trials if place in trial.places]
        table = module.LAUNCHES[place.bytes, place.width]
        tried = {table[place.kernel]}
        yield place, table[place.kernel], _row(place, table[place.kernel], users, [trial.best for trial in users], True)
        waiting = list(propose(table[place.kernel]))
        while waiting:
            candidate = waiting.pop(0)
            if candidate in tried:
                continue
            tried.add(candidate)
            before, table[place.kernel] = table[place.kernel], candidate
            found, words = zip(*(trial.judge() for trial in users), strict=True)
            wins = math.prod(new / trial.best for new, trial in zip(found, users, strict=True)) < GAIN ** len(users)
            if wins:
                waiting = list(propose(candidate))
                for new, trial in zip(found, users, strict=True):
                    trial.best = new
            else:
                table[place.kernel] = before
            row = _row(place, candidate, users, list(found), wins)
            yield place, table[place.kernel], {**row, "verdicts": list(words)}


def _row(place: Place, launch: Any, users: list[Trial], found: list[float], kept: bool) -> dict[str, Any]:
    milliseconds = {
        trial.work.shape: round(ms, 4) if math.isfinite(ms) else None for trial, ms in zip(users, found, strict=True)
    }
    first = users[0]
    head = {"op": first.work.op, "dtype": str(first.dtype).removeprefix("torch."), **place._asdict()}
    return {**head, "launch": launch._asdict(), "milliseconds": milliseconds, "kept": kept}
