"""Time the delta rule's kernels of two commits beside each other, and write their figures. Needs a GPU.

python benchmarks/kernel_versions.py OUTPUT.json THEN [NOW] [gates]

THEN and NOW are folders with the `kernels` of a commit (`git archive COMMIT kernels | tar x -C THEN`); NOW is this
checkout if it is left out. With `gates` the delta rule has a gate in each token. Each commit is timed in processes of
its own, which take turns, twice. Nothing is compared with float64 here: `longseq benchmark kernels` does that.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command import run_script
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
TURNS, WARM = 2, 20
LARGE = 1 << 25  # numbers of an input
CHILD = "--time"
GATES = "gates"
CACHE = 256 << 20  # bytes that are written before each call: more than a second-level cache holds


# A process that times has the kernels of one commit alone, of which an early one lacks what longseq's own clock
# (`longseq.tools.benchmark.measure`) imports.
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


def time_version(gated: bool) -> dict[str, dict[str, float]]:
    """The times by shape of the delta rule that `longseq.kernels` of this process has."""
    from longseq.kernels import delta_rule

    times = {}
    for batch, tokens, heads, width in SHAPES:
        torch.manual_seed(0)
        sizes = (batch, tokens, heads, width)
        q, k, v = (torch.randn(sizes, device="cuda") for _ in range(3))
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        inputs = [x.bfloat16().requires_grad_() for x in (q, k, v)]
        inputs.append(torch.rand(sizes[:3], device="cuda").requires_grad_())
        names = ["q", "k", "v", "beta"]
        if gated:
            inputs.append(functional.logsigmoid(torch.randn(sizes[:3], device="cuda")).requires_grad_())
            names.append("g")
        upstream = torch.randn(sizes, device="cuda").bfloat16()

        named = dict(zip(names, inputs, strict=True))

        def forward(named: dict[str, torch.Tensor] = named) -> None:
            with torch.no_grad():
                delta_rule(**named, backend="triton")

        def both(named: dict[str, torch.Tensor] = named, upstream: torch.Tensor = upstream) -> None:
            o, _ = delta_rule(**named, backend="triton")
            torch.autograd.grad(o, list(named.values()), upstream)

        count = 100 if torch.Size(sizes).numel() >= LARGE else 300
        shape = f"B={batch} T={tokens} H={heads} K={width} V={width}"
        times[shape] = {}
        for name, work in (("forward", forward), ("both", both)):
            graph = capture(work)
            time_graph(graph, WARM)
            times[shape][name] = time_graph(graph, count)
            del graph
    return times


def time_in_process(folder: Path, gated: bool) -> dict[str, dict[str, float]]:
    """The times of the kernels below `folder`, which are imported in place of those that are installed."""
    with tempfile.TemporaryDirectory() as made:
        package = Path(made, "longseq")
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "kernels").symlink_to((folder / "kernels").resolve(strict=True))
        command = [sys.executable, __file__, CHILD, made, *([GATES] if gated else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    gated = GATES in sys.argv[1:]
    words = [word for word in sys.argv[1:] if word != GATES]
    if len(words) not in (2, 3):
        sys.exit(__doc__)
    from longseq.tools.benchmark.report import add_circumstances

    output, folders = Path(words[0]), {"then": Path(words[1]), "now": Path(words[2]) if words[2:] else HERE.parent}
    found: dict[str, list[dict[str, dict[str, float]]]] = {"then": [], "now": []}
    for _ in range(TURNS):
        for name, folder in folders.items():
            found[name].append(time_in_process(folder, gated))
    rows = []
    for shape in found["now"][0]:
        variant = "gated" if gated else "plain"
        row: dict[str, Any] = {"op": "delta_rule", "variant": variant, "shape": shape, "dtype": "bfloat16"}
        for kind in ("forward", "both"):
            then, now = (statistics.mean(one[shape][kind] for one in found[name]) for name in ("then", "now"))
            row |= {
                f"{kind}_then_ms": round(then, 4),
                f"{kind}_ms": round(now, 4),
                f"{kind}_share": round(now / then, 3),
            }
        rows.append(row)
    result = {
        "what": "The delta rule's kernels beside those of an earlier commit",
        "command": "python benchmarks/kernel_versions.py OUTPUT.json THEN",
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
        sys.path.insert(0, sys.argv[2])
        print(json.dumps(time_version(GATES in sys.argv[3:])))
    else:
        run_script(main, __doc__, gpu="times kernels")
