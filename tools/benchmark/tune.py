"""`longseq benchmark tune`: find the fastest launches of an operation's Triton kernels on this GPU.

It starts from the launches in the tables that an operation's calls use, its own or another operation's. It changes one
constant of one kernel at a time, and keeps the change if the result is correct and the call is faster, until no change
helps. The best launches are written to a file, which kernels read if LONGSEQ_LAUNCHES names it (see
`longseq.kernels.launch_file`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor

from longseq import kernels
from longseq.files import replacing
from longseq.kernels.launch_file import LAUNCHES_VARIABLE, find_misfit, read_launches
from longseq.kernels.self_test import SELF_TEST_VARIABLE
from longseq.tasks.circumstances import find_circumstances
from longseq.tasks.training.command import CommandKeys, read_command
from longseq.tasks.training.options import Length, OneOf, Range
from longseq.tools.benchmark.gate import Gate, call_op, options_of, tensors_of
from longseq.tools.benchmark.kernels import find_modules
from longseq.tools.benchmark.measure import capture, environment, one_line, time_in_turn
from longseq.tools.benchmark.report import (
    Dtypes,
    check_names,
    check_output,
    command_line,
    find_device,
    is_emulated,
)
from longseq.tools.benchmark.work import TINY, Shapes, Work, choose_work, list_measured

# A change must gain this much. Less is noise, and whoever measures again should get the same table.
GAIN = 0.99
CHOICES = {
    "block": (16, 32, 64, 128, 256),
    "step": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
    "registers": (None, 128, 168, 255),
    "entries": (1, 2, 4, 8, 16, 32, 64),
    "vector": (1, 2, 4, 8),
    "tokens": (1, 2, 4, 8, 16),
}
CRASHED = "crashed: the process did not come back"
Tables = Mapping[str, ModuleType]  # the modules with a table LAUNCHES, by their folder of kernels


class Place(NamedTuple):
    """The place of a launch: the table's folder, the key in the table, and the kernel."""

    op: str
    bytes: int
    width: int
    kernel: str


@dataclass(frozen=True, kw_only=True)
class TuneKeys(CommandKeys):
    """The keys of `longseq benchmark tune`; conf/benchmark_tune.yaml documents them."""

    op: Annotated[str, OneOf(list_measured)]
    shapes: Shapes | None
    kernels: Annotated[list[str], Length(1)] | None
    dtypes: Dtypes
    gradients: bool
    device: str
    seconds: Annotated[float, Range(above=0)]
    output: str


def run(cfg: DictConfig) -> dict[str, Any]:
    """Tune what `benchmark_tune.yaml` selects, and write the launches with every candidate's row."""
    keys = read_command(TuneKeys, cfg)
    device = find_device(keys.device)
    if device.type != "cuda" and not is_emulated():
        raise ValueError(f"device={device} runs no Triton kernels: tune on a CUDA device")
    if os.environ.get(LAUNCHES_VARIABLE):
        raise ValueError(f"{LAUNCHES_VARIABLE} replaces the tables that tuning starts from: unset it")
    tables = find_tables()
    names = tables_of(keys.op, tables)
    work = choose_shapes(keys.op, keys.shapes, device)
    if keys.kernels is not None:
        known = {name for op in names for launches in tables[op].LAUNCHES.values() for name in launches}
        check_names("kernels", keys.kernels, sorted(known))
    capability = list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    file = File(check_output(keys.output, None), tables, capability, circumstances(device))
    with environment({SELF_TEST_VARIABLE: "0"}):  # every candidate is compared with float64 here
        for dtype in (getattr(torch, name) for name in keys.dtypes):
            trials = [Trial(tables, item, dtype, device, keys.seconds, keys.gradients) for item in work]
            try:
                for place, launch, row in tune(tables, trials, keys.kernels, set(file.tuned), file):
                    Console().print(json.dumps(row), markup=False, highlight=False, soft_wrap=True)
                    file.add(place, launch, row)
            except KeyboardInterrupt:
                file.begin(None)
                raise
            except Exception as error:
                if file.trying is None:
                    raise
                raise ValueError(
                    f"the GPU failed at {file.trying} ({one_line(error)}): run the command again, which leaves it out"
                ) from error
    if not file.tuned:
        raise ValueError(f"kernels={keys.kernels}: no shape that was tried launches any of them: name others")
    print(f"written: {keys.output}; kernels take their launches from it where {LAUNCHES_VARIABLE} names it")
    return file.held


def circumstances(device: torch.device) -> dict[str, Any]:
    """The circumstances that identify a run in the file."""
    found = find_circumstances(device)
    found.setdefault("gpu", f"{found['processor']}, Triton emulated")
    return {"command": command_line(), **found}


class File:
    """The file that a run extends: it replaces the launches of its own family of GPUs and keeps the others."""

    def __init__(self, path: Path, tables: Tables, capability: list[int] | None, run: Mapping[str, Any]) -> None:
        self.path, self.capability = path, capability
        self.tuned: dict[Place, Any] = {}
        self.held: dict[str, Any] = {"launches": [], "rows": [], "runs": []}
        if path.exists():
            held = read_launches(path, f"output={path}", "name another file, or delete this one")
            # Tables may have changed: launches that the kernels would refuse are dropped.
            fitting = {part: [row for row in held[part] if _fits(row, tables)] for part in ("launches", "rows")}
            self.held = {**fitting, "runs": held["runs"]}
            if "trying" in held and _fits(held["trying"], tables):
                self.held["rows"].append({**held["trying"], "kept": False, "verdicts": [CRASHED]})
        self.head = {"capability": capability, "run": len(self.held["runs"])}
        self.held["runs"].append(dict(run))
        self.trying: dict[str, Any] | None = None

    def begin(self, place: Place | None, launch: Any = None) -> None:
        """Write which launch is tried next, or that none is: after a crash, the file names the launch."""
        self.trying = None if place is None else {**place._asdict(), "launch": launch._asdict(), **self.head}
        self._write()

    def has_crashed(self, place: Place, launch: Any) -> bool:
        """True if an earlier process crashed in this launch, on this family of GPUs."""
        wanted = {**place._asdict(), "launch": launch._asdict(), "capability": self.capability}
        return any(wanted.items() <= row.items() for row in self.held["rows"] if _is_crash(row))

    def add(self, place: Place, launch: Any, row: dict[str, Any]) -> None:
        """Write a candidate and the best launch of its place at once, so that a later crash does not lose them."""
        if place not in self.tuned:
            self.held["rows"] = self._without(place, "rows")
        self.tuned[place] = launch
        self.held["rows"].append({**row, **self.head})
        best = {**place._asdict(), "launch": launch._asdict(), **self.head}
        self.held["launches"] = [*self._without(place, "launches"), best]
        self.begin(None)

    def _write(self) -> None:
        trying = {} if self.trying is None else {"trying": self.trying}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as partial:
            partial.write_text(json.dumps({**self.held, **trying}, indent=2) + "\n", encoding="utf-8")

    def _without(self, place: Place, part: str) -> list[dict[str, Any]]:
        """The rows of other places or other GPUs, and the rows of crashes."""
        return [
            row
            for row in self.held[part]
            if _is_crash(row) or (_place_of(row), row["capability"]) != (place, self.capability)
        ]


def _place_of(row: Mapping[str, Any]) -> Place:
    return Place(*(row[name] for name in Place._fields))


def _is_crash(row: Mapping[str, Any]) -> bool:
    return row.get("verdicts") == [CRASHED]


def _fits(row: Mapping[str, Any], tables: Tables) -> bool:
    """True if the tables accept this launch in its place."""
    place = _place_of(row)
    launches = tables[place.op].LAUNCHES.get((place.bytes, place.width), {}) if place.op in tables else {}
    entry = launches.get(place.kernel)
    return entry is not None and find_misfit(entry, place.kernel, row["launch"]) is None


def choose_shapes(op: str, shapes: Any, device: torch.device) -> list[Work]:
    """The calls for tuning. Raises ValueError, with an example, for an operation without default shapes."""
    try:
        return choose_work(shapes, [op], device)
    except ValueError as error:
        if shapes is not None:
            raise
        sizes = next(item.sizes for item in TINY if item.op == op)
        example = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(f"{error}, such as shapes=[{{op: {op}, {example}}}]") from None


def find_tables() -> Tables:
    """The modules with a table of launches."""
    tables: dict[str, ModuleType] = {}
    folder = Path(kernels.__file__).parent
    for package in pkgutil.iter_modules([str(folder)]):
        for found in pkgutil.iter_modules([str(folder / package.name)]) if package.ispkg else ():
            if found.name.startswith("triton_"):
                module = importlib.import_module(f"longseq.kernels.{package.name}.{found.name}")
                if hasattr(module, "LAUNCHES"):
                    tables[package.name] = module
    return tables


def list_tuned(tables: Tables) -> list[str]:
    """The operations whose calls read launches from tables."""
    return [op for op in list_measured() if _imported_tables(op, tables)]


def tables_of(op: str, tables: Tables) -> list[str]:
    """The tables from which an operation's calls read launches: its own, and those of the operations whose kernels it
    launches.
    """
    found = _imported_tables(op, tables) if op in list_measured() else []
    if not found:
        raise ValueError(f"op={op} launches no kernels of a table: choose one of {', '.join(list_tuned(tables))}")
    return found


def _imported_tables(op: str, tables: Tables) -> list[str]:
    """The tables in an operation's Triton modules, and in the modules that these import."""
    own = find_modules(op)
    sources = "".join(inspect.getsource(importlib.import_module(name)) for name in own)
    return [name for name, module in tables.items() if module.__name__ in own or f"from {module.__name__} " in sources]


class _Watched(dict[Any, Any]):
    """A table that records which of its entries were read."""

    def __init__(self, entries: Any) -> None:
        super().__init__(entries)
        self.read: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def find_places(tables: Mapping[str, Any], call: Callable[[], Any]) -> list[Place]:
    """The launches that a call reads from tables, in order."""
    before = {op: module.LAUNCHES for op, module in tables.items()}
    watched = {op: {key: _Watched(launches) for key, launches in table.items()} for op, table in before.items()}
    try:
        for op, module in tables.items():
            module.LAUNCHES = watched[op]
        call()
    finally:
        for op, module in tables.items():
            module.LAUNCHES = before[op]
    return [
        Place(op, key[0], key[1], kernel)
        for op, table in watched.items()
        for key, launches in table.items()
        for kernel in launches
        if kernel in launches.read
    ]


def propose(kernel: str, launch: Any) -> Iterator[Any]:
    """Launches that differ from this one in one constant, by one step in its list of choices."""
    for constant, value in launch._asdict().items():
        choices: tuple[Any, ...] = CHOICES.get(constant, ())
        if value == 0:
            continue  # the kernel does not have this block
        at = choices.index(value) if value in choices else None
        for index, choice in enumerate(choices):
            candidate = launch._replace(**{constant: choice})
            if (at is None or abs(index - at) == 1) and not candidate.find_fault(kernel):
                yield candidate


class Trial:
    """One shape on which candidates are compared and timed."""

    def __init__(
        self, tables: Tables, work: Work, dtype: torch.dtype, device: torch.device, seconds: float, gradients: bool
    ) -> None:
        self.work, self.dtype, self.device, self.seconds = work, dtype, device, seconds
        self.gradients = gradients
        self.gate = Gate(work, dtype, device, gradients)
        inputs = work.make(dtype, device)
        self.function = call_op(inputs, options_of(inputs, work), "triton")
        self.leaves = {
            name: x.requires_grad_(gradients and x.is_floating_point()) for name, x in tensors_of(inputs).items()
        }
        verdict = self.gate.judge_backend("triton")
        if not verdict.passed:
            raise ValueError(f"{work.op} {work.shape} cannot be tuned, as it is {verdict.words}")
        self.places = find_places(tables, self.call)
        self.best = self.measure()
        if math.isinf(self.best):
            raise ValueError(f"{work.op} {work.shape} cannot be tuned, as it fails at full size")

    def call(self) -> tuple[Tensor, ...]:
        """Forward and backward at full size, or only forward, as in inference."""
        if not self.gradients:
            with torch.no_grad():
                return self.function(self.leaves)
        outputs = self.function(self.leaves)
        wanted = [x for x in self.leaves.values() if x.requires_grad]
        return torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])

    def measure(self) -> float:
        """The median milliseconds, on a GPU of a CUDA graph, without host time; infinite for a call that fails."""
        try:
            run = capture(self.call, self.device) if self.device.type == "cuda" else self.call
        except Exception:
            return math.inf
        times = time_in_turn({"call": run}, self.device, self.seconds)["call"].times
        return math.inf if times is None else times.median

    def judge(self) -> tuple[float, str]:
        """Milliseconds, infinite for a wrong result, and the result of the comparison with float64."""
        verdict = self.gate.judge_backend("triton")
        milliseconds = self.measure() if verdict.passed else math.inf
        if math.isinf(milliseconds) and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # raises if nothing can run any more
        return milliseconds, verdict.words


def tune(
    tables: Mapping[str, Any],
    trials: list[Trial],
    only: list[str] | None = None,
    done: Collection[Place] = (),
    file: File | None = None,
) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    """Yield for every candidate its place, the best launch there so far, and its row.

    A candidate is judged on all shapes whose calls read their launch from that place, by the geometric mean of their
    times. Places in `done` are not changed. The file records each candidate before it is tried, and which ones crashed.
    """
    for place in dict.fromkeys(place for trial in trials for place in trial.places):
        if place in done or (only and place.kernel not in only):
            continue
        users = [trial for trial in trials if place in trial.places]
        table = tables[place.op].LAUNCHES[place.bytes, place.width]
        tried = {table[place.kernel]}
        yield place, table[place.kernel], _row(place, table[place.kernel], users, [trial.best for trial in users], True)
        waiting = list(propose(place.kernel, table[place.kernel]))
        while waiting:
            candidate = waiting.pop(0)
            if candidate in tried:
                continue
            tried.add(candidate)
            if file is not None:
                if file.has_crashed(place, candidate):
                    continue
                file.begin(place, candidate)
            before, table[place.kernel] = table[place.kernel], candidate
            found, words = zip(*(trial.judge() for trial in users), strict=True)
            wins = math.prod(new / trial.best for new, trial in zip(found, users, strict=True)) < GAIN ** len(users)
            if wins:
                waiting = list(propose(place.kernel, candidate))
                for new, trial in zip(found, users, strict=True):
                    trial.best = new
            else:
                table[place.kernel] = before
            row = _row(place, candidate, users, list(found), wins)
            yield place, table[place.kernel], {**row, "verdicts": list(words)}


def _row(place: Place, launch: Any, users: list[Trial], found: list[float], kept: bool) -> dict[str, Any]:
    milliseconds = {
        f"{trial.work.variant} {trial.work.shape}": round(ms, 4) if math.isfinite(ms) else None
        for trial, ms in zip(users, found, strict=True)
    }
    first = users[0]
    call = {"call": first.work.op, "dtype": str(first.dtype).removeprefix("torch."), "gradients": first.gradients}
    return {**place._asdict(), "launch": launch._asdict(), **call, "milliseconds": milliseconds, "kept": kept}
