"""Train mixers, their ablations and DeiT-Tiny on CIFAR-10 with one recipe and write cifar10.json.

python benchmarks/cifar10.py data=FILE.npz [output=FILE.json] [jobs=N] [seconds=N] [key=value ...]   (see trainings.py)

FILE.npz is written by cifar10_data.py. Augmented images depend on the seed, the epoch and the image alone: they are
made once for each seed, and all models of that seed read them. `jobs` runs share the GPUs of this machine: speeds are
those of a model that has its GPU to itself only with one job a GPU.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from entry import augment, file_of, read_cifar10_from
from hydra import compose, initialize_config_module
from trainings import Row, find_digest, read_options, run_table, visible_gpus

from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.training.configuration import Config, resolve
from longseq.tasks.training.recipe import device_batch_size

EXPERIMENT = "experiment=image/cifar10"


def row(name: str, mixer: str, *words: str) -> Row:
    return Row(name, (EXPERIMENT, f"mixer={mixer}", *words))


# The widths of the MLPs bring models to 3.6 million parameters, as many as attention has, or to Longhorn's 4.6.
ROWS = [
    Row("deit_tiny", ("experiment=image/cifar10_deit_tiny",)),
    *(row(name, name) for name in ("attention", "linear_attention", "deltanet", "longhorn", "longhorn_exact", "mamba")),
    row("deltanet without convolution", "deltanet", "mixer.options.convolution_width=0"),
    row("longhorn without convolution", "longhorn", "mixer.options.convolution_width=1"),
    row("longhorn_exact without convolution", "longhorn_exact", "mixer.options.convolution_width=1"),
    row("mamba without convolution", "mamba", "mixer.options.convolution_width=1"),
    row("longhorn with a narrow MLP", "longhorn", "model.mlp_ratio=2.4"),
    row("longhorn_exact with a narrow MLP", "longhorn_exact", "model.mlp_ratio=2.5"),
    row("mamba with a narrow MLP", "mamba", "model.mlp_ratio=2.2"),
    row("attention with a wide MLP", "attention", "model.mlp_ratio=5.65"),
    row("deltanet with a wide MLP", "deltanet", "model.mlp_ratio=5.65"),
]
HEAD = {
    "what": "CIFAR-10 from scratch, one recipe",
    "kind": "accuracy",
    "notes": [
        "Each run is `longseq train experiment=image/cifar10 mixer=MIXER seed=SEED` (DeiT-Tiny: "
        "experiment=image/cifar10_deit_tiny) with the overrides of the command: batch 256, bfloat16 autocast, 45,000 "
        "training images, 5,000 for validation, 10,000 for the test, of which one is 0.0001. Cells: mean ± standard "
        "deviation over the seeds (the value of each seed).",
        "The longseq models have eight blocks and mean pooling over 64 tokens of width 192, rows read both ways; "
        "DeiT-Tiny has its twelve blocks and its class token.",
        "Without convolution: mixer.options.convolution_width=0 where the mixer takes that, else 1, with which the "
        "convolution reads the token itself alone (a factor for each channel). With a narrow or a wide MLP: "
        "model.mlp_ratio brings the model to the size of attention's, or attention's and DeltaNet's to Longhorn's.",
        "Runs that shared a GPU: their seconds and images/s are no measure of a model's speed.",
    ],
}


def find_overrides(words: tuple[str, ...], overrides: list[str], folder: Path) -> Config:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return resolve(compose("train", [*words, *overrides, f"output={folder}"]))


def augment_epoch(task: tuple[int, int], file: str, folder: Path, overrides: list[str]) -> None:
    """In a process of its own: what runs of a seed see in an epoch."""
    seed, epoch = task
    torch.set_num_threads(1)
    read_cifar10_from(file)
    config = find_overrides((EXPERIMENT, f"seed={seed}", f"data.root={file}"), overrides, folder)
    datamodule = ImageDataModule.from_config(config, device_batch_size(config))
    augment(datamodule.train_dataloader().dataset, folder, epoch)


def augment_all(file: str, folder: Path, seeds: list[int], overrides: list[str]) -> None:
    epochs = find_overrides((EXPERIMENT, f"data.root={file}"), overrides, folder)["recipe"]["epochs"]
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [(seed, epoch) for seed in seeds for epoch in range(epochs) if not file_of(folder, seed, epoch).exists()]
    started, workers = time.monotonic(), min(len(tasks), os.cpu_count() or 1)
    if tasks:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            list(pool.map(partial(augment_epoch, file=file, folder=folder, overrides=overrides), tasks))
    print(f"{len(tasks)} epochs augmented in {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    words = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("data="))
    if "data" not in words:
        sys.exit(__doc__)
    file = str(Path(words["data"]).absolute())
    arguments = [word for word in sys.argv[1:] if not word.startswith("data=")]
    gpus = visible_gpus()
    started = time.monotonic()
    try:
        options = read_options(arguments, "cifar10", [row.name for row in ROWS], seeds=3, jobs=6 * max(len(gpus), 1))
        augmented = options.work / f"augmented_{find_digest(file, options.overrides)}"
        augment_all(file, augmented, options.seeds, options.overrides)
        changes = (f"cifar10={file}", f"augmented={augmented}")
        rows = [
            one._replace(words=(*one.words, f"data.root={file}", "data.num_workers=0"), changes=changes) for one in ROWS
        ]
        command = " ".join(["python benchmarks/cifar10.py data=FILE.npz", *options.overrides])
        spent = time.monotonic() - started
        head = {**HEAD, "command": command}
        sys.exit(run_table(rows, head, options._replace(seconds=options.seconds - spent), gpus))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
