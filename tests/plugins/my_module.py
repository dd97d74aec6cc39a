"""A plug-in in one file, as it lies in a user's working folder: a mixer, a data source, a metric and callbacks."""

import os
import signal
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback
from PIL import Image
from torch import Tensor
from torchmetrics import Metric

from longseq import mixers
from longseq.mixers.linear_attention import LinearAttention
from longseq.tasks.image.sources import Split, Splits, register_source
from longseq.tasks.training import targets


@mixers.register("mine")
class Mine(LinearAttention):
    """Linear attention that is not normalised."""

    def __init__(self, d_model: int, *, num_heads: int | None = None, backend: str = "auto") -> None:
        super().__init__(d_model, num_heads=num_heads, normalizer=False, backend=backend)


class Halves:
    """Images of 8 x 8 whose upper or lower half is white."""

    def __init__(self) -> None:
        self.class_names = ["upper", "lower"]

    def __len__(self) -> int:
        return 64

    def read(self, index: int) -> tuple[Image.Image, int]:
        pixels = np.full((8, 8), index, np.uint8)
        pixels[4 * (index % 2) :][:4] = 255
        return Image.fromarray(pixels), index % 2

    def path(self, index: int) -> str:
        return f"halves#{index}"

    def targets(self) -> np.ndarray:
        return np.arange(64) % 2


@register_source("halves")
def halves(root: str | None, *, download: bool, val_fraction: float, split_seed: int) -> Splits:
    train, validation, test = np.split(np.arange(64), [32, 48])
    return Splits(Split(Halves(), train), Split(Halves(), validation), Split(Halves(), test))


@targets.register("metric")
class ShareOfUpper(Metric):
    """The share of images that are taken for the first class."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("counts", torch.zeros(num_classes), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        chosen = predictions.argmax(1) if predictions.ndim == 2 else predictions
        self.counts += chosen.bincount(minlength=self.num_classes)

    def compute(self) -> Tensor:
        return self.counts[0] / self.counts.sum()


@targets.register("callback")
class CountRanks(Callback):
    """Leaves a file for each process of a run."""

    def on_fit_end(self, trainer, pl_module) -> None:
        Path(trainer.default_root_dir, f"rank{trainer.global_rank}").touch()


@targets.register("callback")
class StopOnce(Callback):
    """Has the run told to end after its first update, the first time."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        mark = Path(trainer.default_root_dir, "stopped")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
