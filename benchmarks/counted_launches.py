"""Measure constants of launches that are in no table of launches, and write counted_launches.json. Needs a GPU.

python benchmarks/counted_launches.py

Each constant is halved twice and doubled twice, while the others keep their values. The calls are one-token forms with
one and with 128 sequences, and the features and the loss of 32,768 tokens, forward and backward. A row is one value of
one constant.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from command import run_script
from torch import Tensor

from longseq.kernels.testing import Inputs, make_inputs
from longseq.tools.benchmark.measure import Run, capture, one_line, time_in_turn
from longseq.tools.benchmark.report import add_circumstances

HERE = Path(__file__).parent
NOTE = (
    "CUDA graphs, cold caches; one constant changed at a time, `usual` is the one in use. One token: bfloat16, float32 "
    "states. Constants stay where others are faster in one place and slower in another, or by less than 2 %."
)
FACTORS = (0.25, 0.5, 1, 2, 4)
SECONDS = 1.0
MODEL = {"H": 16, "K": 64, "V": 128, "D": 2048, "N": 16, "M": 64, "W": 4}


class Constant(NamedTuple):
    """A constant of a module, and the call that it affects."""

    module: str
    name: str
    op: str
    sizes: dict[str, int]


STEPS = (
    Constant("triton_steps", "WARP", "delta_rule", MODEL),
    Constant("triton_steps", "COLUMNS", "delta_rule", MODEL),
    Constant("triton_steps", "COLUMNS", "delta_rule", MODEL | {"H": 8, "K": 256, "V": 256}),
    Constant("triton_steps", "COLUMNS", "variational_linear_attention", MODEL),
    Constant("triton_steps", "WARP", "linear_attention", MODEL),
    Constant("triton_steps", "COLUMNS", "linear_attention", MODEL),
    Constant("diagonal_scan.triton_step", "NUMBERS", "longhorn_scan", MODEL),
    Constant("diagonal_scan.triton_step", "NUMBERS", "selective_scan", MODEL),
    Constant("orthogonal_recurrence.triton_step", "STATE", "orthogonal_recurrence", MODEL | {"D": 64}),
    Constant("slot_attention.triton_step", "VALUES", "slot_attention", MODEL),
    Constant("slot_attention.triton_step", "KEYS", "slot_attention", MODEL),
    Constant("short_convolution.triton_step", "NUMBERS", "short_convolution", MODEL),
    Constant("recursive_least_squares.triton_step", "MATRIX", "recursive_least_squares", MODEL),
    Constant("recursive_least_squares.triton_step", "ROWS", "recursive_least_squares", MODEL | {"K": 256}),
)
TOKENS = (
    Constant("map_features.triton_map", "BLOCK", "map_features", MODEL),
    Constant("map_features.triton_map", "WARP", "map_features", MODEL),
    Constant("token_loss.triton_loss", "BLOCK", "token_loss", {"D": 32768}),
    Constant("token_loss.triton_loss", "WARPS", "token_loss", {"D": 32768}),
)


def make(constant: Constant, batch: int, tokens: int, device: torch.device) -> Inputs:
    """Inputs in bfloat16, with float32 states, as in models."""
    inputs = make_inputs(
        constant.op, batch=batch, tokens=tokens, dtype=torch.bfloat16, sizes=constant.sizes, device=device
    )
    return inputs.replace({name: x.float() for name, x in inputs.tensors.items() if name.startswith("initial_state")})


def one_token(inputs: Inputs) -> Run:
    return lambda: inputs.step(0, inputs.initial_state, backend="triton")


def both_passes(inputs: Inputs) -> Run:
    leaves = inputs.map(lambda x: x.requires_grad_())

    def run() -> list[Tensor | None]:
        output = leaves.run(backend="triton")[0]
        return list(torch.autograd.grad(output.sum(), list(leaves.tensors.values()), allow_unused=True))

    return run


def rows_of(
    constant: Constant, make_run: Callable[[Inputs], Run], batch: int, tokens: int, device: torch.device
) -> list[dict[str, Any]]:
    """One row for each value of a constant."""
    module = importlib.import_module(f"longseq.kernels.{constant.module}")
    usual, inputs = getattr(module, constant.name), make(constant, batch, tokens, device)
    values = {str(max(int(usual * factor), 1)): factor == 1 for factor in FACTORS}
    runs: dict[str, Run] = {}
    failures: dict[str, str | None] = {}
    for value in values:
        with mock.patch.object(module, constant.name, int(value)):
            try:
                runs[value] = capture(make_run(inputs), device)
            except Exception as error:
                failures[value] = one_line(error)
    outcomes = time_in_turn(runs, device, SECONDS)
    times = {value: outcome.times.median for value, outcome in outcomes.items() if outcome.times is not None}
    failures |= {value: outcome.failure for value, outcome in outcomes.items()}
    sizes = " ".join(f"{name}={constant.sizes[name]}" for name in ("H", "K", "V", "D") if name in constant.sizes)
    head = {"op": constant.op, "sizes": sizes, "sequences": batch, "tokens": tokens}
    head["constant"] = f"{constant.module}.{constant.name}"
    return [
        head
        | {
            "value": int(value),
            "usual": is_usual,
            "milliseconds": round(times[value], 5) if value in times else None,
            "failure": failures[value],
        }
        for value, is_usual in values.items()
    ]


def main() -> None:
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for constant in STEPS:
            for batch in (1, 128):
                rows += rows_of(constant, one_token, batch, 1, device)
    for constant in TOKENS:
        rows += rows_of(constant, both_passes, 16, 2048, device)
    result = {
        "what": "Constants of launches that are in no table of launches",
        "command": "python benchmarks/counted_launches.py",
        "kind": "speed",
        "rows": add_circumstances(rows, device),
        "notes": [NOTE],
    }
    (HERE / "counted_launches.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(main, __doc__, most=0, gpu="measures launches on a GPU")
