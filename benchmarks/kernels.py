"""Compare operations and their peers with float64, and time them forward and backward.

python benchmarks/kernels.py [--ops delta_rule ...] [--calls "delta_rule gated B=4 T=4096 H=8 K=128 V=128" ...]

An implementation that is wrong is not timed. Peers are flash-linear-attention, mamba-ssm and torch's attention, if they
are installed. On a CPU the shapes are tiny, and times are relative to the torch form.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gate import Function, Gate, Verdict, call_op, options_of, tensors_of
from measure import (
    Outcome,
    Run,
    add_cache_argument,
    added_bytes,
    capture,
    compiled_kernels,
    one_line,
    time_in_turn,
    time_once,
)
from peers import Peer, Tensors, find_peers
from report import add_common_arguments, is_emulated, make_result, to_markdown, write_result
from torch import Tensor
from work import Work, choose_work

from longseq import kernels
from longseq.kernels import explain
from longseq.kernels.self_test import SELF_TEST_VARIABLE

NOTES = (
    "Verdict: before it is timed, an implementation's output and gradients are compared with float64 in the same call. "
    "Allowed is twice the error of the torch form in the same precision (four times in float16, eight times there in "
    "slot_attention, 32 times for peers, which round more); what is wrong gets no time.",
    "Milliseconds are medians (the rows have the quantiles 0.2 and 0.8), both is forward and backward, graph the same "
    "as a CUDA graph. All of one shape ran in one process, in turn, each call with a cold second-level cache. Peak: "
    "the inputs and what forward and backward add.",
    "First call: seconds of one forward and backward with nothing compiled before, imports left out; no figure where "
    "an earlier row of the process had compiled for the same widths and options.",
)
ON_CPU = "Measured on a CPU: times are relative to the torch form's, and say nothing of a GPU."
EMULATED = "Triton's kernels were emulated on the CPU: they are compared with float64 and not timed."


class _Contestant(NamedTuple):
    """An implementation that is ready to be timed."""

    name: str
    leaves: Tensors
    function: Function
    modules: tuple[str, ...]  # the modules of the kernels that its first call compiles
    peer: Peer | None = None

    def forward(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.function(self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        outputs = self.function(self.leaves)
        wanted = [x for x in self.leaves.values() if x.requires_grad]
        return torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=[], help="names of operations; all if left out")
    parser.add_argument("--calls", nargs="+", default=[], help="operation, variant, sizes and options of each call")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--backends", nargs="+", default=["triton", "torch"])
    parser.add_argument("--no-peers", action="store_true", help="leave out other packages")
    add_common_arguments(parser, seconds=0.5, output="kernels.json")
    add_cache_argument(parser)
    options = parser.parse_args()
    device, rows, compiled = options.device, [], set()
    notes = NOTES if device.type == "cuda" else (NOTES[0], ON_CPU, *([EMULATED] if is_emulated() else []))
    # The comparison here is stricter than the self-test, and first calls are timed with empty caches.
    os.environ[SELF_TEST_VARIABLE] = "0"
    with compiled_kernels(options.cache):
        for item in choose_work(options.calls, options.ops, device):
            for dtype in (getattr(torch, name) for name in options.dtypes):
                rows += measure_work(item, dtype, device, options, compiled)
                result = make_result("Operations and their peers", rows, device, notes)
                write_result(result, options.output)  # after every shape: a kernel that crashes loses no row
    print(to_markdown(result))


def measure_work(
    work: Work, dtype: torch.dtype, device: torch.device, options: argparse.Namespace, compiled: set[Any]
) -> list[dict[str, Any]]:
    """The rows of one shape: each of our backends, then the peers."""
    head = {"op": work.op, "variant": work.variant, "shape": work.shape, "dtype": str(dtype).removeprefix("torch.")}
    try:
        contestants, refused = _enter(work, dtype, device, options)
        rows = {name: {**head, "implementation": name} for name in (*contestants, *refused)}
        for name, reason in refused.items():
            rows[name]["verdict"] = f"refused: {reason}"
        for name, contestant in contestants.items():
            key = (name, work.op, work.variant, dtype, str(work.options), *_widths(work))
            if options.cache is None and contestant.modules and key not in compiled:
                compiled.add(key)
                rows[name].update(_time_first_call(contestant, device))
        for name, verdict in _judge(work, dtype, device, contestants).items():
            rows[name]["verdict"] = verdict.words
            if not verdict.passed:
                contestants.pop(name)
                rows[name].pop("first_call_s", None)
        _time(rows, contestants, device, options.seconds)
    except Exception as error:  # such as too little memory: the other shapes are still measured
        return [{**head, "implementation": "all", "verdict": f"not measured: {one_line(error)}"}]
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return list(rows.values())


def _widths(work: Work) -> tuple[int, ...]:
    """The sizes for which kernels are compiled, and whether a sequence is short."""
    return (*(size for name, size in work.sizes.items() if name not in "BTH"), work.sizes["T"] <= 1024)


def _enter(
    work: Work, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
) -> tuple[dict[str, _Contestant], dict[str, str]]:
    """The implementations that can run a call, and the reasons of those that cannot."""
    inputs = work.make(dtype, device)
    given = options_of(inputs, work)
    tensors = {name: _leaf(x) for name, x in tensors_of(inputs).items()}
    contestants, refused = {}, {}
    for backend, reasons in explain(work.op, device=device, dtype=dtype, sizes=work.sizes).items():
        if backend not in options.backends:
            continue
        if reasons:
            refused[backend] = "; ".join(reasons)
        else:
            function = call_op(inputs, given, backend)
            modules = find_modules(work.op) if backend == "triton" else ()
            contestants[backend] = _Contestant(backend, tensors, function, modules)
    for peer in find_peers(work, tensors, device) if not options.no_peers else ():
        leaves = {name: _leaf(x) for name, x in peer.prepare({k: x.detach() for k, x in tensors.items()}).items()}
        contestants[peer.name] = _Contestant(peer.name, leaves, _bind(peer, given), peer.modules, peer)
    return contestants, refused


def find_modules(op: str) -> tuple[str, ...]:
    """The modules of an operation's Triton kernels."""
    package = importlib.import_module(getattr(kernels, op).__module__)
    found = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return tuple(module.name for module in found if ".triton_" in module.name)


def _bind(peer: Peer, options: Mapping[str, Any]) -> Function:
    return lambda tensors: (peer.run(tensors, options),)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _time_first_call(contestant: _Contestant, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    try:
        for module in contestant.modules:
            importlib.import_module(module)
        return {"first_call_s": round(time_once(contestant.both, device), 2)}
    except Exception:
        return {}  # the gate reports what is wrong


def _judge(
    work: Work, dtype: torch.dtype, device: torch.device, contestants: Mapping[str, _Contestant]
) -> dict[str, Verdict]:
    gate = Gate(work, dtype, device)
    return {
        name: gate.judge_backend(name) if contestant.peer is None else gate.judge_peer(contestant.peer)
        for name, contestant in contestants.items()
    }


def _time(
    rows: dict[str, dict[str, Any]], contestants: dict[str, _Contestant], device: torch.device, seconds: float
) -> None:
    """Add the times and the memory of all contestants to the rows."""
    passes = ("forward", "both")
    if device.type != "cuda":
        if is_emulated():
            contestants.pop("triton", None)
        for name in passes:
            found = time_in_turn({who: getattr(c, name) for who, c in contestants.items()}, device, seconds)
            _enter_ratios(rows, found, name)
        return
    for who, contestant in contestants.items():
        try:
            own = sum(x.numel() * x.element_size() for x in contestant.leaves.values())
            rows[who]["peak_mib"] = round((own + added_bytes(contestant.both, device)) / 2**20)
        except Exception as error:
            rows[who]["remark"] = one_line(error)
    for name in passes:
        runs: dict[str, Run] = {who: getattr(c, name) for who, c in contestants.items()}
        _enter_times(rows, time_in_turn(runs, device, seconds), f"{name}_ms")
        for who, function in runs.items():
            try:
                found = time_in_turn({who: capture(function, device)}, device, seconds)
            except Exception as error:
                found = {who: Outcome(None, f"no graph: {one_line(error)}")}
            _enter_times(rows, found, f"{name}_graph_ms")


def _enter_times(rows: dict[str, dict[str, Any]], found: Mapping[str, Outcome], column: str) -> None:
    for who, outcome in found.items():
        if outcome.times is None:
            rows[who]["remark"] = outcome.failure
        else:
            median, *quantiles = (round(milliseconds, 4) for milliseconds in outcome.times)
            rows[who].update({column: median, f"{column}_quantiles": quantiles})


def _enter_ratios(rows: dict[str, dict[str, Any]], found: Mapping[str, Outcome], name: str) -> None:
    bar = found["torch"].times if "torch" in found else None
    for who, outcome in found.items():
        if outcome.times is None:
            rows[who]["remark"] = outcome.failure
        elif bar is not None:
            rows[who][f"{name}_of_torch"] = round(outcome.times.median / bar.median, 2)


if __name__ == "__main__":
    main()
