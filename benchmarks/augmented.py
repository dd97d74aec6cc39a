"""Make the augmented training images of CIFAR-10 once, for all runs of a seed:

python benchmarks/augmented.py data=FILE.npz folder=FOLDER [seeds=0,1,2] [key=value ...]
python benchmarks/entry.py cifar10=FILE.npz augmented=FOLDER -- compare comparison=cifar10 data.root=FILE.npz ...

cifar10_data.py writes FILE.npz. Augmented images depend only on the seed, the epoch and the image. If many runs share
the processor, each would otherwise spend most of its time on making its own. Every other argument is an override of
`longseq train experiment=image/cifar10`.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from command import run_script
from entry import augment, file_of, read_cifar10_from
from hydra import compose, initialize_config_module

from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.recipe import device_batch_size

EXPERIMENT = "experiment=image/cifar10"


def find_overrides(words: tuple[str, ...], overrides: list[str], folder: Path) -> Any:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return resolve(compose("train", [*words, *overrides, f"output={folder}"]))


def augment_epoch(task: tuple[int, int], file: str, folder: Path, overrides: list[str]) -> None:
    """Write the images of an epoch for all runs of a seed; called in a process of its own."""
    seed, epoch = task
    torch.set_num_threads(1)
    read_cifar10_from(file)
    config = find_overrides((EXPERIMENT, f"seed={seed}", f"data.root={file}"), overrides, folder)
    datamodule = ImageDataModule.from_config(config, device_batch_size(config))
    augment(datamodule.train_dataloader().dataset, folder, epoch)


def main() -> None:
    words = {"seeds": "0,1,2"}
    words |= dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith(("data=", "folder=", "seeds=")))
    overrides = [word for word in sys.argv[1:] if word.split("=", 1)[0] not in words]
    if not {"data", "folder"} <= words.keys():
        sys.exit(__doc__)
    file, folder = str(Path(words["data"]).absolute()), Path(words["folder"])
    Path(file).stat()  # one that is not there is told before processes begin
    epochs = find_overrides((EXPERIMENT, f"data.root={file}"), overrides, folder)["recipe"]["epochs"]
    folder.mkdir(parents=True, exist_ok=True)
    every = [(int(seed), epoch) for seed in words["seeds"].split(",") for epoch in range(epochs)]
    tasks = [(seed, epoch) for seed, epoch in every if not file_of(folder, seed, epoch).exists()]
    started = time.monotonic()
    if tasks:
        with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1), get_context("spawn")) as pool:
            list(pool.map(partial(augment_epoch, file=file, folder=folder, overrides=overrides), tasks))
    print(f"{len(tasks)} epochs augmented in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    run_script(main, __doc__)
