"""`longseq` with changes for measurements: python benchmarks/entry.py [KEY=VALUE ...] -- VERB ARGUMENTS

rounding=N      move every initial weight by one unit in the last place, up or down at random; N seeds the choice
cifar10=FILE    read CIFAR-10 from the file that `cifar10_data.py unpack` wrote, in place of a folder
augmented=PATH  read the augmented training images from the files that `augment` wrote, in place of making them

VERB is train or compare; the runs that `compare` starts are changed, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command import HELP
from torch import nn

from longseq.tasks.data.batch import Batch
from longseq.tasks.data.sampler import SampleIndex
from longseq.tasks.image import data, sources
from longseq.tasks.image.datasets import TrainingBatches
from longseq.tasks.image.model import ImageModel
from longseq.tasks.image.sources import ArraySource, Split, Splits, split_off
from longseq.tools import cli

# Passes the changes on to the processes that a run or a comparison starts with this script.
VARIABLE = "LONGSEQ_BENCHMARK_CHANGES"
CHUNK = 1000  # images that are augmented at a time


@torch.no_grad()
def move_by_one_unit(model: nn.Module, draw: int) -> nn.Module:
    """The model with every weight replaced by one of its two neighbours among the numbers of its type."""
    generator = torch.Generator().manual_seed(draw)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf)))
    return model


def round_initial_weights(draw: int) -> None:
    build: Callable[..., nn.Module] = ImageModel.build

    def build_moved(*arguments: Any) -> nn.Module:
        model = build(*arguments)
        # A model without weights is built to check its options.
        return model if next(model.parameters()).is_meta else move_by_one_unit(model, draw)

    ImageModel.build = build_moved


def open_cifar10(file: str, val_fraction: float, split_seed: int) -> Splits:
    """The splits of `data=cifar10` for the folder that was packed."""
    with np.load(file) as arrays:
        names = arrays["class_names"].tolist()
        train, test = (ArraySource(arrays[part], arrays[f"{part}_labels"], names, file) for part in ("train", "test"))
    return Splits(*split_off(Split.whole(train), val_fraction, split_seed), Split.whole(test))


def read_cifar10_from(file: str) -> None:
    def source(_: str, *, download: bool, val_fraction: float, split_seed: int) -> Splits:
        return open_cifar10(file, val_fraction, split_seed)

    sources._SOURCES["cifar10"] = source


def file_of(folder: Path, seed: int, epoch: int) -> Path:
    return folder / f"seed{seed}_epoch{epoch}.npy"


def augment(batches: TrainingBatches, folder: Path, epoch: int) -> None:
    """Write the training images of an epoch: they are functions of seed, epoch and position, for every model."""
    file = file_of(folder, batches.seed, epoch)
    if file.exists():
        return
    indices = [SampleIndex(position, 0, epoch) for position in range(len(batches))]
    parts = [batches[indices[start : start + CHUNK]].inputs for start in range(0, len(indices), CHUNK)]
    partial = file.with_suffix(".partial")
    with open(partial, "wb") as written:
        np.save(written, torch.cat(parts).numpy())
    partial.rename(file)


class AugmentedBatches(TrainingBatches):
    """The batches of TrainingBatches, read from the files of `augment`."""

    folder: Path

    def __getitem__(self, indices: list[SampleIndex]) -> Batch:
        if any(index.repeat for index in indices):
            raise ValueError(
                "augmented=PATH holds one image for each position and epoch: take recipe.augment.repeats=1"
            )
        images = np.load(file_of(self.folder, self.seed, indices[0].epoch), mmap_mode="r")
        positions = [index.position for index in indices]
        targets = self.split.source.targets()[self.split.indices[positions]]
        return Batch(torch.from_numpy(images[positions]), torch.from_numpy(targets), [])


def read_augmented_from(folder: str) -> None:
    AugmentedBatches.folder = Path(folder)
    data.TrainingBatches = AugmentedBatches


CHANGES: dict[str, Callable[[str], None]] = {
    "rounding": lambda draw: round_initial_weights(int(draw)),
    "cifar10": read_cifar10_from,
    "augmented": read_augmented_from,
}


def main() -> Any:
    if "--" in sys.argv:
        end = sys.argv.index("--")
        os.environ[VARIABLE] = json.dumps(sys.argv[1:end])
        del sys.argv[1 : end + 1]
    if VARIABLE not in os.environ:
        if sys.argv[1:2] and sys.argv[1] in HELP:
            print(__doc__.strip())
            return None
        sys.exit(__doc__)
    for word in json.loads(os.environ[VARIABLE]):
        key, _, value = word.partition("=")
        if key not in CHANGES:
            sys.exit(__doc__)
        CHANGES[key](value)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
