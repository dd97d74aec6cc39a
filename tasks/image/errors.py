"""The wrongly classified images of the highest loss, as a picture for TensorBoard and as a list of files."""

from __future__ import annotations

import csv
import io
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from longseq.tasks.data.loader import likeliest_classes
from longseq.tasks.image.examples import name_images
from longseq.tasks.image.pictures import draw_predictions, is_due, spell_targets
from longseq.tasks.image.transforms import denormalize
from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.charts import find_board
from longseq.tasks.training.system import write_text

COLUMNS = ("path", "true_class", "predicted_class", "probability", "loss")
_SPLITS = {"val": "validation", "test": "test"}


class Mistake(NamedTuple):
    """An image that was classified wrongly: `probability` is that of the predicted class, `loss` the cross entropy.

    Of several labels any one may be wrong. `probability` is then the highest one that a decision has against the truth,
    and `loss` the mean of the labels' binary cross entropies.
    """

    path: str
    true: str
    predicted: str
    probability: float
    loss: float
    pixels: Tensor  # uint8 [C, S, S]; of no channels where no picture is drawn


@targets.register("callback")
class WorstErrors(Callback):
    """Lists the wrongly classified images of the highest loss, with the columns `COLUMNS`, in `folder`:
    worst_errors_val_last.csv is of the last validation, worst_errors_val.csv of the one that best.ckpt belongs to, and
    worst_errors_test.csv of the test. Those of validation also have the column `epoch`, the epochs trained before it.

    `val/worst_errors` and `test/worst_errors` are pictures of the first `count` of at most `rows` images, with their
    files' names. A run gets about `pictures` of those of validation, evenly spaced. An image of a stream has no file
    and is named by its batch.
    """

    FILES = ("worst_errors_val.csv", "worst_errors_val_last.csv", "worst_errors_test.csv")

    def __init__(
        self,
        folder: str,
        count: int = 16,
        rows: int = 100,
        pictures: int = 20,
    ) -> None:
        self.folder = Path(folder)
        self.count, self.rows, self.pictures = count, rows, pictures
        self._drawn: _Worst | None = None
        self._listed: _Worst | None = None
        self._sizes: list[int] = []  # of the batches
        self._validated: str | None = None  # the list of the last validation, in the process that writes

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._drawn, self._listed, self._sizes = None, None, []

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_epoch_start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        images, true = batch
        self._sizes.append(len(true))
        if outputs is not None:
            module: Any = pl_module
            worst = _Worst.of_batch(outputs, true, module.decide(outputs), images, batch_idx, module.multi_label)
            self._drawn = worst.beside(self._drawn, self.count)
            self._listed = worst._replace(images=images[:, :0]).beside(self._listed, self.rows)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        drawn = is_due(trainer, pl_module, self.pictures)
        self._tell(trainer, "val", trainer.global_step - 1, drawn=drawn, epoch=module.epochs_trained)

    def on_best_validation(self) -> None:
        """`BestCheckpoint` calls this if the last validation is the best one so far."""
        if self._validated is not None:
            write_text(self.folder / "worst_errors_val.csv", self._validated)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer, "test", trainer.global_step, drawn=True)

    def _tell(self, trainer: Trainer, stage: str, step: int, *, drawn: bool, epoch: float | None = None) -> None:
        listed = _of_all_processes(trainer, self._name(trainer, stage, self._listed))[: self.rows]
        shown = _of_all_processes(trainer, self._name(trainer, stage, self._drawn))[: self.count] if drawn else []
        self._drawn = self._listed = None
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        told = spell(listed, epoch)
        if epoch is None:
            write_text(self.folder / f"worst_errors_{stage}.csv", told)
        else:
            self._validated = told
            write_text(self.folder / f"worst_errors_{stage}_last.csv", told)
        board = find_board(trainer)
        if shown and board is not None:
            picture = draw_predictions(
                torch.stack([one.pixels for one in shown]).float() / 255,
                [one.predicted for one in shown],
                [one.true for one in shown],
                notes=[os.path.basename(one.path) for one in shown],
            )
            board.experiment.add_image(f"{stage}/worst_errors", picture, step)

    def _name(self, trainer: Trainer, stage: str, worst: _Worst | None) -> list[Mistake]:
        """The mistakes of this process, worst first, with the names of their files."""
        if worst is None:
            return []
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        loader: Any = trainer.val_dataloaders if stage == "val" else trainer.test_dataloaders
        pixels = denormalize(worst.images, datamodule.info).mul(255).round() if worst.images.shape[1] else worst.images
        pixels = pixels.to("cpu", torch.uint8)
        labels = (spell_targets(targets, datamodule.info) for targets in (worst.true, worst.predicted))
        columns: tuple[Any, ...] = (*labels, worst.probability.tolist(), worst.loss.tolist(), pixels)
        names: dict[int, list[str]] = {}
        mistakes = []
        for (batch, row), *values in zip(worst.places.tolist(), *columns, strict=True):
            if batch not in names:
                names[batch] = name_images(datamodule, _SPLITS[stage], loader, batch, self._sizes[batch])
            mistakes.append(Mistake(names[batch][row], *values))
        return [one for one in mistakes if one.loss != -math.inf]


class _Worst(NamedTuple):
    """The images of the highest loss so far, all on the device, so that no batch waits for it."""

    loss: Tensor  # [K], -inf of images that were classified correctly
    probability: Tensor  # [K] of the predicted class
    true: Tensor  # [K], or [K, C] of several labels
    predicted: Tensor  # int64, as `true`
    places: Tensor  # int64 [K, 2]: the batch, and the row in it
    images: Tensor  # [K, C, S, S] normalised

    @classmethod
    def of_batch(
        cls, logits: Tensor, true: Tensor, predicted: Tensor, images: Tensor, batch_idx: int, multi_label: bool
    ) -> _Worst:
        if multi_label:
            loss = nn.functional.binary_cross_entropy_with_logits(logits, true, reduction="none").mean(dim=1)
            right = (predicted == true).all(dim=1)
            probability = torch.where(true > 0, (-logits).sigmoid(), logits.sigmoid()).amax(dim=1)
        else:
            loss = nn.functional.cross_entropy(logits, true, reduction="none")
            true = likeliest_classes(true)
            right = predicted == true
            probability = logits.softmax(dim=1).gather(1, predicted[:, None])[:, 0]
        loss = loss.masked_fill(right, -math.inf)
        rows = torch.arange(len(true), device=true.device)
        places = torch.stack([torch.full_like(rows, batch_idx), rows], dim=1)
        return cls(loss, probability, true, predicted, places, images)

    def beside(self, other: _Worst | None, count: int) -> _Worst:
        """The `count` worst of both."""
        own = self.first(count)
        return own if other is None else _Worst(*map(torch.cat, zip(other, own, strict=True))).first(count)

    def first(self, count: int) -> _Worst:
        order = self.loss.topk(min(count, len(self.loss))).indices
        return _Worst(*(values[order] for values in self))


def _of_all_processes(trainer: Trainer, mistakes: list[Mistake]) -> list[Mistake]:
    """The mistakes of all processes, worst first."""
    gathered: list[Any] = [mistakes]
    if trainer.world_size > 1:
        gathered = [None] * trainer.world_size
        torch.distributed.all_gather_object(gathered, mistakes)
    return sorted((one for part in gathered for one in part), key=lambda one: (-one.loss, one.path))


def spell(mistakes: list[Mistake], epoch: float | None = None) -> str:
    """Mistakes as a csv with the columns `COLUMNS`, and with `epoch` where that is given."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    of_epoch = [] if epoch is None else [f"{epoch:g}"]
    writer.writerow([*COLUMNS, *(["epoch"] if of_epoch else [])])
    for one in mistakes:
        writer.writerow([one.path, one.true, one.predicted, f"{one.probability:.6f}", f"{one.loss:.6f}", *of_epoch])
    return file.getvalue()
