"""Train every mixer and DeiT-Tiny on CIFAR-10 with one recipe and write cifar10.json.

python benchmarks/cifar10.py data.root=FOLDER [key=value ...]

The further words are overrides of each `longseq train`. The runs queue for the GPUs of this machine, one run a GPU, so
that images/s are those of a model that has its GPU to itself.
"""

from __future__ import annotations

import datetime
import json
import os
import queue
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from longseq.mixers import mixer_names

HERE = Path(__file__).parent
DEIT = "deit_tiny"


def train(model: str, overrides: list[str], gpu: int, folder: Path) -> dict[str, Any]:
    """One run on one GPU; its row."""
    output = folder / model
    choice = ["experiment=image/cifar10_deit_tiny"] if model == DEIT else ["experiment=image/cifar10", f"mixer={model}"]
    command = [Path(sys.executable).with_name("longseq"), "train", *choice, f"hydra.run.dir={output}", *overrides]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "4"}
    with open(folder / f"{model}.log", "w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RuntimeError(f"{model} ended with exit code {code}; see {folder / model}.log")
    metrics = json.loads((output / "metrics.json").read_text())
    return {
        "model": model,
        "parameters_millions": round(metrics["parameters"] / 1e6, 2),
        "epochs": metrics["epochs"],
        "test_top1": round(metrics["test/top1"], 4),
        "validation_top1": round(metrics["val/top1"], 4),
        "training_seconds": round(metrics["seconds"]),
        "training_images_per_second": round(metrics["images_per_second"]),
    }


def main() -> None:
    overrides = sys.argv[1:]
    if not any(word.startswith("data.root=") for word in overrides):
        sys.exit(__doc__)
    count = torch.cuda.device_count()
    if not count:
        sys.exit("torch sees no GPU, and this recipe takes one")
    free: queue.Queue[int] = queue.Queue()
    for gpu in range(count):
        free.put(gpu)
    folder = Path(tempfile.mkdtemp(prefix="cifar10_"))
    print(f"logs and runs: {folder}")

    def on_a_free_gpu(model: str) -> dict[str, Any]:
        gpu = free.get()
        try:
            row = train(model, overrides, gpu, folder)
        finally:
            free.put(gpu)
        print(row, flush=True)
        return row

    with ThreadPoolExecutor(count) as pool:
        rows = list(pool.map(on_a_free_gpu, [DEIT, *mixer_names()]))
    shown = [word for word in overrides if not word.startswith("data.root=")]
    result = {
        "what": "CIFAR-10 from scratch, one recipe",
        "command": " ".join(["python benchmarks/cifar10.py data.root=FOLDER", *shown]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton", "timm", "lightning")},
        "rows": rows,
    }
    (HERE / "cifar10.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
