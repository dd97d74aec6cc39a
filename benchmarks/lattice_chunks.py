"""Measure the error and the time saved of Lattice's chunk approximation, and write lattice_chunks.json.

python benchmarks/lattice_chunks.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from command import run_script
from sklearn.datasets import load_digits
from torch import Tensor, nn

from longseq.kernels import orthogonal_recurrence
from longseq.mixers import compression
from longseq.tasks.training.checkpoint import load
from longseq.tools.benchmark.report import add_circumstances

HERE = Path(__file__).parent
OBJECTIVES = ("decode", "encode", "similarity")
CHUNK_SIZES = (1, 4, 16, 64)
EPOCHS = 4

# The arguments of one call of the operation, by name.
Call = dict[str, Any]


def random_call(objective: str) -> Call:
    """Random keys and values of about unit length, independent between tokens."""
    batch, tokens, heads, width = 4, 256, 4, 64
    q, k, v = torch.randn(3, batch, tokens, heads, width).unbind()
    slots = torch.linalg.qr(torch.randn(batch, heads, width, width)).Q
    gamma = torch.rand(batch, tokens, heads)
    return {
        "q": q, "k": k / width**0.5, "v": v / width**0.5, "gamma": gamma, "initial_state": slots, "objective": objective
    }  # fmt: skip


def train(objective: str, folder: Path) -> tuple[nn.Module, float]:
    """A classifier of digits trained with the exact recurrence, and its test accuracy."""
    command = [
        Path(sys.executable).with_name("longseq"), "train", "mixer=lattice", f"mixer.options.objective={objective}",
        f"recipe.epochs={EPOCHS}", "model.patch_size=2", "model.stride=2", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    metrics = json.loads((folder / "metrics.json").read_text())
    return load(folder / "checkpoints" / "best.ckpt").backbone, metrics["test/top1"]


def layer_calls(model: nn.Module) -> list[Call]:
    """The arguments of the recurrence of each layer, in each direction, for a batch of images."""
    images = torch.as_tensor(load_digits().images[-64:], dtype=torch.float32).unsqueeze(1) / 16
    with torch.no_grad(), mock.patch.object(compression, "orthogonal_recurrence", wraps=orthogonal_recurrence) as spy:
        model((images - 0.3053) / 0.3760)
    names = ("q", "k", "v", "gamma")
    kept = (*names, "g", "initial_state", "objective", "normalize")
    calls = [{**dict(zip(names, call.args, strict=True)), **call.kwargs} for call in spy.call_args_list]
    return [{name: call[name] for name in kept} for call in calls]


def relative_error(calls: list[Call], chunk_size: int) -> float:
    """‖o - exact‖ / ‖exact‖ over all calls; exact is the recurrence in float64."""
    wrong = right = 0.0
    for call in calls:
        wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in call.items()}
        exact, _ = orthogonal_recurrence(**wide, backend="reference")
        o, _ = orthogonal_recurrence(**call, chunk_size=chunk_size)
        wrong += (o - exact).square().sum().item()
        right += exact.square().sum().item()
    return (wrong / right) ** 0.5


def processor_seconds(calls: list[Call]) -> dict[int, float]:
    """CPU time of a forward and backward pass of all calls by chunk size, which take turns, the least of five."""
    leaves = ("q", "k", "v", "gamma")
    calls = [{**call, **{name: call[name].clone().requires_grad_() for name in leaves}} for call in calls]
    seconds: dict[int, list[float]] = {size: [] for size in CHUNK_SIZES}
    for _ in range(6):  # the first one warms up
        for chunk_size in CHUNK_SIZES:
            start = time.process_time()
            for call in calls:
                o, _ = orthogonal_recurrence(**call, chunk_size=chunk_size)
                o.sum().backward()
            seconds[chunk_size].append(time.process_time() - start)
    return {size: min(taken[1:]) for size, taken in seconds.items()}


def measure(inputs: str, objective: str, calls: list[Call]) -> list[dict[str, Any]]:
    """One row for each chunk size."""
    seconds = processor_seconds(calls)
    rows = []
    for chunk_size in CHUNK_SIZES:
        rows.append(
            {
                "mixer": "lattice",
                "inputs": inputs,
                "objective": objective,
                "chunk_size": chunk_size,
                "relative_output_error": float(f"{relative_error(calls, chunk_size):.2g}"),
                "time_relative_to_exact": round(seconds[chunk_size] / seconds[1], 2),
            }
        )
        print(rows[-1], flush=True)
    return rows


def approximation_rows(objective: str) -> list[dict[str, Any]]:
    """The error of the approximation on random inputs and on those of trained layers."""
    torch.manual_seed(0)
    rows = measure("random", objective, [random_call(objective)])
    with tempfile.TemporaryDirectory() as folder:
        model, top1 = train(objective, Path(folder))
    return rows + measure(f"trained on digits (test top-1 {top1:.3f})", objective, layer_calls(model))


def tell(rows: list[dict[str, Any]], chunk_size: int) -> str:
    """What chunks of this size change and cost, in a sentence."""
    random, trained = (
        [row for row in rows if row["chunk_size"] == chunk_size and (row["inputs"] == "random") == is_random]
        for is_random in (True, False)
    )
    errors = [100 * row["relative_output_error"] for row in trained]
    short, long = ([row["time_relative_to_exact"] for row in some] for some in (trained, random))
    return (
        f"chunks of {chunk_size} change what trained layers compute by {min(errors):.0f} to {max(errors):.0f} %, and "
        f"take {min(long):.2f} to {max(long):.2f} of the exact form's time for 256 tokens, {min(short):.2f} to "
        f"{max(short):.2f} for 17"
    )


def main() -> None:
    torch.set_num_threads(1)
    rows = [row for one in OBJECTIVES for row in approximation_rows(one)]
    result = {
        "what": "Lattice: chunks instead of the exact recurrence",
        "command": "python benchmarks/lattice_chunks.py",
        "kind": "accuracy",
        "rows": add_circumstances(rows, torch.device("cpu")),
        "notes": [
            "Random: 256 tokens, 64 slots of 64 channels, keys and values of about unit length, γ uniform in (0, 1). "
            f"Trained: all layers and both directions of `longseq train mixer=lattice recipe.epochs={EPOCHS} "
            "model.patch_size=2 model.stride=2`, trained with the exact recurrence: 16 slots of 16 channels in each of "
            "four heads, and 17 tokens, which one chunk of 64 holds.",
            "Error: ‖o − exact‖ / ‖exact‖ of the output before its gate, exact being the recurrence in float64; with "
            "chunk_size=1, which is exact, it is rounding. Time: processor time of forward and backward, the least of "
            "five; the chunk sizes took turns.",
            f"The default of the mixer is 1: {tell(rows, 4)}; {tell(rows, 16)}.",
        ],
    }
    (HERE / "lattice_chunks.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(main, __doc__, most=0)
