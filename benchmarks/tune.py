"""Look for faster launches of an operation's Triton kernels on this GPU, and print them.

python benchmarks/tune.py delta_rule [--calls "delta_rule plain B=8 T=4096 H=16 K=128 V=128" ...] [--inference]

It starts from the tables `LAUNCHES` that the calls read. It changes one field of one entry by one step at a time, and
keeps the change if the results agree with float64 and the calls are faster, until no change helps. A person copies what
is printed last into the table.
"""

from __future__ import annotations

import argparse
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
from gate import Gate, call_op, options_of, tensors_of
from measure import capture, time_in_turn
from report import add_common_arguments
from torch import Tensor
from work import Work, choose_work

from longseq import kernels
from longseq.kernels.self_test import SELF_TEST_VARIABLE

GAIN = 0.99  # the factor of time that a change must reach; less is noise
CHOICES: dict[str, tuple[Any, ...]] = {
    "block": (16, 32, 64, 128, 256),
    "step": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
    "registers": (None, 128, 168, 255),
    "entries": (1, 2, 4, 8, 16, 32, 64),
    "vector": (1, 2, 4, 8),
    "tokens": (1, 2, 4, 8, 16),
}


class Place(NamedTuple):
    """An entry of a table of launches."""

    folder: str
    key: tuple[int, int]
    kernel: str


class Table(dict[Any, Any]):
    """The launches of one key of a table, which records the kernels that were looked up."""

    def __init__(self, entries: dict[Any, Any], module: ModuleType) -> None:
        super().__init__(entries)
        self.module = module
        self.read: dict[Any, None] = {}

    def __getitem__(self, kernel: Any) -> Any:
        self.read[kernel] = None
        return super().__getitem__(kernel)

    def __setitem__(self, kernel: Any, launch: Any) -> None:
        super().__setitem__(kernel, launch)
        for function in vars(self.module).values():
            if hasattr(function, "cache_clear"):  # launches that were prepared by the entry before
                function.cache_clear()


def watch_tables() -> dict[str, ModuleType]:
    """The modules with a table `LAUNCHES`, by folder, whose tables now record what is looked up."""
    folder, found = Path(kernels.__file__).parent, {}
    for package in pkgutil.iter_modules([str(folder)]):
        for name in pkgutil.iter_modules([str(folder / package.name)]) if package.ispkg else ():
            if name.name.startswith("triton_"):
                module = importlib.import_module(f"longseq.kernels.{package.name}.{name.name}")
                if hasattr(module, "LAUNCHES"):
                    module.LAUNCHES = {key: Table(table, module) for key, table in module.LAUNCHES.items()}
                    found[package.name] = module
    return found


def propose(launch: Any) -> Iterator[Any]:
    """Launches that differ from this one in one field, by one step in its list of choices."""
    for field, value in launch._asdict().items():
        choices = CHOICES[field]
        if value == 0 or value not in choices:
            continue  # the kernel does not have this block
        place = choices.index(value)
        for choice in choices[max(place - 1, 0) : place + 2]:
            if choice != value:
                yield launch._replace(**{field: choice})


class Trial:
    """One call, at full size, forward and backward or without gradients."""

    def __init__(self, work: Work, device: torch.device, seconds: float, gradients: bool) -> None:
        self.device, self.seconds = device, seconds
        self.gate = Gate(work, torch.bfloat16, device, gradients)
        inputs = work.make(torch.bfloat16, device)
        function = call_op(inputs, options_of(inputs, work), "triton")
        leaves = {name: x.requires_grad_(gradients and x.is_floating_point()) for name, x in tensors_of(inputs).items()}
        self.call = with_gradients(function, leaves) if gradients else lambda: function(leaves)
        self.best = self.measure()

    def measure(self) -> float:
        """Median milliseconds of a CUDA graph; infinite if the results are wrong or the call fails."""
        if not self.gate.judge_backend("triton").passed:
            return math.inf
        try:
            run = capture(self.call, self.device) if self.device.type == "cuda" else self.call
        except Exception:
            return math.inf
        times = time_in_turn({"call": run}, self.device, self.seconds)["call"].times
        return math.inf if times is None else times.median


def with_gradients(
    function: Callable[[dict[str, Tensor]], tuple[Tensor, ...]], leaves: dict[str, Tensor]
) -> Callable[[], Any]:
    """The call of a function and of its backward pass."""

    def run() -> Any:
        outputs = function(leaves)
        wanted = [x for x in leaves.values() if x.requires_grad]
        return torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])

    return run


def improve(table: Table, kernel: str, trials: list[Trial]) -> None:
    """Replace the launch of a kernel by the fastest one that is found."""
    waiting, tried = list(propose(table[kernel])), {table[kernel]}
    while waiting:
        candidate = waiting.pop(0)
        if candidate in tried:
            continue
        tried.add(candidate)
        before, table[kernel] = table[kernel], candidate
        found = [trial.measure() for trial in trials]
        ratio = math.prod(new / trial.best for new, trial in zip(found, trials, strict=True))
        print(json.dumps({"kernel": kernel, **candidate._asdict(), "milliseconds": found}), flush=True)
        if ratio >= GAIN ** len(trials):
            table[kernel] = before
            continue
        waiting = list(propose(candidate))
        for new, trial in zip(found, trials, strict=True):
            trial.best = new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", help="name of an operation")
    parser.add_argument("--calls", nargs="+", default=[], help='as in kernels.py: "OP VARIANT B=8 T=2048 ..."')
    parser.add_argument("--kernels", nargs="+", help="names of kernels in the tables; all if left out")
    parser.add_argument("--inference", action="store_true", help="tune calls without gradients")
    add_common_arguments(parser, seconds=0.1, output="launches.json")
    options = parser.parse_args()
    os.environ[SELF_TEST_VARIABLE] = "0"  # every candidate is compared with float64 here
    tables = watch_tables()
    work = choose_work(options.calls, [options.op], options.device)
    trials = [Trial(item, options.device, options.seconds, not options.inference) for item in work]
    places = [
        Place(folder, key, kernel)
        for folder, module in tables.items()
        for key, table in module.LAUNCHES.items()
        for kernel in table.read
        if options.kernels is None or kernel in options.kernels
    ]
    found = []
    for place in places:
        table = tables[place.folder].LAUNCHES[place.key]
        before = table[place.kernel]
        improve(table, place.kernel, trials)
        if table[place.kernel] != before:
            found.append({**place._asdict(), "before": before._asdict(), "launch": table[place.kernel]._asdict()})
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
