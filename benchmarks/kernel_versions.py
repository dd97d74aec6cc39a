"""Time the kernels of two commits beside each other, and write their figures. Needs a GPU.

python benchmarks/kernel_versions.py OUTPUT.json THEN [NOW] [gates | others | OPERATION]

THEN and NOW are folders with the `kernels` of a commit (`git archive COMMIT kernels | tar x -C THEN`); NOW is this
checkout if it is left out. The delta rule is timed, with `gates` with a gate in each token, and with `others` other
operations in its place, or only the one that is named (linear_attention). Each commit is timed in processes of its own,
which take turns, twice. Nothing is compared with float64 here: kernels.py does that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).parent
SHAPES = (
    (1, 2048, 4, 128),
    (1, 4096, 4, 128),
    (1, 16384, 16, 128),
    (1, 65536, 16, 128),
    (8, 2048, 16, 128),
    (8, 2048, 8, 256),
    (8, 2048, 32, 64),
    (128, 197, 6, 64),
)  # B, T, H, K
OTHERS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("linear_attention", "plain", {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}),
    ("linear_attention", "head_gated", {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}),
    ("linear_attention", "head_gated", {"B": 8, "T": 2048, "H": 32, "K": 64, "V": 64}),
    ("linear_attention", "channel_gated", {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}),
    ("linear_attention", "channel_gated", {"B": 8, "T": 2048, "H": 32, "K": 64, "V": 64}),
    ("linear_attention", "channel_gated", {"B": 1, "T": 16384, "H": 4, "K": 128, "V": 256}),
    ("linear_attention", "head_gated", {"B": 1, "T": 49152, "H": 8, "K": 128, "V": 128}),
    ("linear_attention", "channel_gated", {"B": 128, "T": 197, "H": 6, "K": 64, "V": 64}),
    ("linear_attention", "extreme_channel_decay", {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}),
    ("linear_attention", "extreme_value_decay", {"B": 8, "T": 2048, "H": 32, "K": 64, "V": 64}),
    ("slot_attention", "plain", {"B": 8, "T": 2048, "H": 4, "K": 512, "V": 512, "M": 64}),
    ("longhorn_scan", "plain", {"B": 8, "T": 2048, "D": 4096, "N": 16}),
    ("longhorn_scan", "plain", {"B": 1, "T": 16384, "D": 4096, "N": 16}),
    ("selective_scan", "plain", {"B": 8, "T": 2048, "D": 4096, "N": 16}),
    ("selective_scan", "plain", {"B": 1, "T": 16384, "D": 4096, "N": 16}),
    ("longhorn_pair", "plain", {"B": 128, "T": 197, "D": 384, "N": 16, "R": 13, "W": 4}),
    ("longhorn_pair", "plain", {"B": 64, "T": 1025, "D": 384, "N": 16, "R": 13, "W": 4}),
    ("longhorn_pair", "plain", {"B": 64, "T": 1025, "D": 768, "N": 16, "R": 25, "W": 4}),
    ("variational_linear_attention", "paper", {"B": 8, "T": 2048, "H": 16, "K": 64, "V": 64}),
    ("short_convolution", "silu", {"B": 8, "T": 2048, "D": 4096, "W": 4}),
)
TURNS, WARM = 2, 20
LARGE = 1 << 25  # numbers of an input
CHILD = "--time"
PLAIN, GATES, REST = "plain", "gates", "others"
CACHE = 256 << 20  # bytes that are written before each call: more than a second-level cache holds

# An operation, the kind of its inputs, its shape, and its tensors and other arguments by name.
Call = tuple[str, str, str, dict[str, Tensor], dict[str, Any]]
# Milliseconds by operation, kind of inputs and shape, of "forward" and "both".
Times = list[tuple[str, str, str, dict[str, float]]]


# A process that times has the kernels of one commit alone, of which an early one lacks what longseq's own clock
# (`measure.py`) imports.
def capture(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The work as a CUDA graph, after three calls that compile its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Milliseconds of a replay with a cold second-level cache, the median of `count`."""
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    events = []
    for _ in range(count):
        cache.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def list_others(kind: str) -> list[tuple[str, str, dict[str, int]]]:
    """The rows of OTHERS, or those of the operation that `kind` names."""
    return [row for row in OTHERS if kind in (REST, row[0])]


def delta_rule_calls(gated: bool) -> Iterator[Call]:
    for batch, tokens, heads, width in SHAPES:
        torch.manual_seed(0)
        sizes = (batch, tokens, heads, width)
        q, k, v = (torch.randn(sizes, device="cuda") for _ in range(3))
        named = {"q": functional.normalize(q, dim=-1), "k": functional.normalize(k, dim=-1), "v": v}
        named = {name: x.bfloat16() for name, x in named.items()} | {"beta": torch.rand(sizes[:3], device="cuda")}
        if gated:
            named["g"] = functional.logsigmoid(torch.randn(sizes[:3], device="cuda"))
        shape = f"B={batch} T={tokens} H={heads} K={width} V={width}"
        yield "delta_rule", "gated" if gated else "plain", shape, named, {}


def other_calls(kind: str) -> Iterator[Call]:
    from longseq.kernels.self_test_inputs import make_inputs

    for op, variant, sizes in list_others(kind):
        own = {name: size for name, size in sizes.items() if name not in "BT"}
        made = make_inputs(
            op, variant, batch=sizes["B"], tokens=sizes["T"], dtype=torch.bfloat16, sizes=own,
            device=torch.device("cuda"),
        )  # fmt: skip
        shape = " ".join(f"{name}={size}" for name, size in sizes.items())
        yield op, variant, shape, {**made.sequences, **made.parameters}, made.options


def time_call(
    op: str, tensors: Mapping[str, Tensor], options: Mapping[str, Any], count: int | None = None
) -> dict[str, float]:
    """Milliseconds of a call of `longseq.kernels` of this process, forward and with the gradients of all tensors.

    Each is the median of `count` replays; None: of 300, or of 100 in large calls.
    """
    from longseq import kernels

    operation = getattr(kernels, op)
    named = {name: x.detach().requires_grad_() for name, x in tensors.items()}

    def call() -> Tensor:
        made = operation(**named, **options, backend="triton")
        return made if isinstance(made, Tensor) else made[0]

    with torch.no_grad():
        upstream = torch.randn_like(call())

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        torch.autograd.grad(call(), list(named.values()), upstream)

    if count is None:
        count = 100 if max(x.numel() for x in named.values()) >= LARGE else 300
    times = {}
    for name, work in (("forward", forward), ("both", both)):
        graph = capture(work)
        time_graph(graph, WARM)
        times[name] = time_graph(graph, count)
        del graph
    return times


def list_calls(kind: str) -> Iterator[Call]:
    return delta_rule_calls(kind == GATES) if kind in (PLAIN, GATES) else other_calls(kind)


def time_version(kind: str) -> Times:
    return [
        (op, variant, shape, time_call(op, tensors, options))
        for op, variant, shape, tensors, options in list_calls(kind)
    ]


def compile_call(kind: str, number: int) -> None:
    """Compile the kernels of a call, which Triton's cache keeps for the processes that time."""
    op, _, _, tensors, options = next(islice(list_calls(kind), number, None))
    time_call(op, tensors, options, count=1)


def run_in_process(folder: Path, *words: str) -> str:
    """What a process prints that has the kernels below `folder` in place of those that are installed."""
    with tempfile.TemporaryDirectory() as made:
        package = Path(made, "longseq")
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "kernels").symlink_to((folder / "kernels").resolve(strict=True))
        done = subprocess.run([sys.executable, __file__, CHILD, made, *words], stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    return done.stdout


def main() -> None:
    words = sys.argv[1:]
    kind = words.pop() if words and words[-1] in (GATES, REST, *(op for op, _, _ in OTHERS)) else PLAIN
    if len(words) not in (2, 3):
        sys.exit(__doc__)
    from report import add_circumstances

    output, folders = Path(words[0]), {"then": Path(words[1]), "now": Path(words[2]) if words[2:] else HERE.parent}
    # The kernels of all calls are compiled first, side by side: one after the other they take most of the time.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        count = len(SHAPES if kind in (PLAIN, GATES) else list_others(kind))
        calls = product(folders.values(), range(count))
        list(pool.map(lambda call: run_in_process(call[0], kind, str(call[1])), calls))
    found: dict[str, list[Times]] = {"then": [], "now": []}
    for _ in range(TURNS):
        for name, folder in folders.items():
            found[name].append(json.loads(run_in_process(folder, kind).splitlines()[-1]))
    rows = []
    for number, (op, variant, shape, _) in enumerate(found["now"][0]):
        row: dict[str, Any] = {"op": op, "variant": variant, "shape": shape, "dtype": "bfloat16"}
        for part in ("forward", "both"):
            then, now = (statistics.mean(one[number][3][part] for one in found[name]) for name in ("then", "now"))
            row |= {
                f"{part}_then_ms": round(then, 4),
                f"{part}_ms": round(now, 4),
                f"{part}_share": round(now / then, 3),
            }
        rows.append(row)
    result = {
        "what": "Kernels beside those of an earlier commit",
        "command": f"python benchmarks/kernel_versions.py OUTPUT.json THEN{'' if kind == PLAIN else f' {kind}'}",
        "kind": "speed",
        "rows": add_circumstances(rows, torch.device("cuda")),
        "notes": [
            "CUDA graphs, each call with a cold second-level cache; medians of 300 replays, of 100 in large calls, and "
            "the mean of the two processes of each commit. both: forward and backward. share: the time now divided by "
            "the time then.",
        ],
    }
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        made, kind, *number = sys.argv[2:]
        sys.path.insert(0, made)
        if number:
            compile_call(kind, int(*number))
        else:
            print(json.dumps(time_version(kind)))
    else:
        main()
