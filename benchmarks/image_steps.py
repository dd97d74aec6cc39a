"""Measure the CPU time and the GPU time of training steps of image models, and write image_steps.json.

python benchmarks/image_steps.py [OUTPUT.json]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command import run_script
from hydra import compose, initialize_config_module
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional

from longseq.tasks.training.configuration import read_command
from longseq.tools.benchmark import models
from longseq.tools.benchmark.measure import Run, synchronize
from longseq.tools.benchmark.report import add_circumstances

HERE = Path(__file__).parent
STEPS = 10  # steps of a mean
AHEAD = 3  # steps that the CPU launches without waiting


def take_apart(step: Run, device: torch.device) -> dict[str, Any]:
    """Milliseconds of the kernels in one step, of a step in a sequence, and of the CPU for launching a step."""
    for _ in range(3):
        step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(AHEAD):
        step()
    host = time.perf_counter() - start
    synchronize(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize(device)
    whole = time.perf_counter() - start
    with torch.profiler.profile() as profile:
        step()
        synchronize(device)
    kernels = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    return {
        "kernels_ms": round(sum(event.time_range.elapsed_us() for event in kernels) / 1e3, 1),
        "launches": len(kernels),
        "step_ms": round(1e3 * whole / STEPS, 1),
        "host_ms": round(1e3 * host / AHEAD, 1),
    }


def build_step(
    make: Callable[[], nn.Module], pixels: int, batch: int, keys: models.ModelsKeys, device: torch.device
) -> Run:
    """The training step of `longseq benchmark models`."""
    assert keys.image is not None
    model, called = models.build_model(make, keys, device)
    model.train()
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(keys.image.classes, (batch,), device=device)
    return models.training_step(model, lambda: functional.cross_entropy(called(images), labels), device)


def measure(overrides: list[str], device: torch.device) -> list[dict[str, Any]]:
    """A row for each model and size of `longseq benchmark models` with these overrides."""
    with initialize_config_module("longseq.conf", version_base="1.3"):
        keys = read_command(models.ModelsKeys, compose("benchmark_models", overrides))
    assert keys.image is not None, "image.models=... names the models that are measured"
    rows = []
    for pixels, batch in keys.image.sizes:
        for head, make in models.image_models(keys.image, pixels, keys.backend):
            step = build_step(make, pixels, batch, keys, device)
            rows.append({**head, "pixels": pixels, "batch": batch, **take_apart(step, device)})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "image_steps.json"
    device = torch.device("cuda")
    result = {
        "what": "A training step of image models: the processor and the GPU",
        "command": "python benchmarks/image_steps.py",
        "kind": "speed",
        "rows": add_circumstances(measure([], device), device),
        "notes": [
            "bfloat16 autocast, fused AdamW, rows read both ways, eager. Kernels: the sum of their times in one step "
            "(copies and fills included), which does not depend on the host; launches: their number. Step: the mean of "
            f"{STEPS} launched one after the other; host: of {AHEAD} of them, until the last is launched."
        ],
    }
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(main, __doc__, most=1, gpu="takes the time of a GPU apart from the processor's")
