"""What a run of image classification reports: figures of each class, and the worst errors."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.sources import Split
from longseq.tasks.training import targets
from longseq.tasks.training.class_report import ClassReport
from longseq.tasks.training.system import write_text


class Mistake(NamedTuple):
    """A wrongly classified image, a row of the file of `WorstErrors`."""

    path: str
    true_class: str
    predicted_class: str
    probability: float
    loss: float


class ImageReport(ClassReport):
    """The figures of each class."""

    unit = "images"
    headline = ("top1", "top5", "accuracy", "f1", "f1_micro", "balanced_accuracy", "average_precision", "loss")

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq export {checkpoint} format=onnx"]


@targets.register("callback")
class WorstErrors(Callback):
    """Lists the wrongly classified test images with the highest loss in `folder`/worst_errors_test.csv.

    The file has at most `rows` images. `probability` is of the predicted class, and `loss` the cross entropy; with
    several labels, `probability` is the highest of a wrong decision, and `loss` the mean over the labels. An image of a
    stream is named by its batch.
    """

    def __init__(self, folder: str, rows: int = 100) -> None:
        self.folder, self.rows = Path(folder), rows
        self._mistakes: list[Mistake] = []

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mistakes = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if outputs is None:
            return
        module: Any = pl_module
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        _, true = batch
        predicted = module.decide(outputs)
        if module.multi_label:
            losses = nn.functional.binary_cross_entropy_with_logits(outputs, true, reduction="none").mean(dim=1)
            wrong = (predicted != true).any(dim=1)
            probabilities = torch.where(true > 0, (-outputs).sigmoid(), outputs.sigmoid()).amax(dim=1)
        else:
            losses = nn.functional.cross_entropy(outputs, true, reduction="none")
            wrong = predicted != true
            probabilities = outputs.softmax(dim=1).gather(1, predicted[:, None])[:, 0]
        rows = losses.masked_fill(~wrong, -math.inf).topk(min(self.rows, int(wrong.sum()))).indices
        names = [f"batch {batch_idx}, image {row}" for row in range(len(true))]
        if datamodule.splits is not None:
            split: Split = datamodule.splits.test
            places: Any = trainer.test_dataloaders.sampler.batch(batch_idx)  # type: ignore[union-attr]
            unreadable = set(datamodule.unreadable)
            files = [split.source.path(int(split.indices[place])) for place in places]
            named = [file for file in files if file not in unreadable]
            names = named if len(named) == len(true) else names
        paths = [names[row] for row in rows.tolist()]
        labels = (spell_targets(one[rows], datamodule.info) for one in (true, predicted))
        columns: Any = (paths, *labels, probabilities[rows].tolist(), losses[rows].tolist())
        self._keep([*self._mistakes, *map(Mistake, *columns)])

    def _keep(self, mistakes: list[Mistake]) -> None:
        self._mistakes = sorted(mistakes, key=lambda one: (-one.loss, one.path))[: self.rows]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, self._mistakes)
            self._keep([one for part in gathered for one in part])
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(Mistake._fields)
        writer.writerows([*one[:3], f"{one.probability:.6f}", f"{one.loss:.6f}"] for one in self._mistakes)
        write_text(self.folder / "worst_errors_test.csv", table.getvalue())


def spell_targets(targets: Tensor, info: DataInfo) -> list[str]:
    """The class of each image for targets [N], or all of its labels for [N, C] of 0 and 1."""
    names = info.class_names
    if targets.ndim == 1:
        return [names[number] for number in targets.tolist()]
    return [", ".join(names[number] for number in row.nonzero().flatten().tolist()) or "none" for row in targets]
