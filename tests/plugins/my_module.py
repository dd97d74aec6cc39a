"""A plug-in in one file, as it lies in a user's working folder: a mixer, a Dataset, a metric and callbacks."""

import os
import signal
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics import Metric

from longseq import mixers
from longseq.mixers.linear_attention import LinearAttention
from longseq.tasks.training import targets


@mixers.register("mine")
class Mine(LinearAttention):
    """Linear attention that is not normalised."""

    def __init__(self, d_model: int, *, num_heads: int | None = None, backend: str = "auto") -> None:
        super().__init__(d_model, num_heads=num_heads, normalizer=False, backend=backend)


class Halves(Dataset):
    """Images of 8 x 8 whose upper or lower half is white."""

    classes = ("upper", "lower")

    def __init__(self, first: int, count: int) -> None:
        self.first, self.targets = first, np.arange(first, first + count) % 2

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        pixels, label = np.full((8, 8), self.first + index, np.uint8), int(self.targets[index])
        pixels[4 * label :][:4] = 255
        return pixels, label


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
