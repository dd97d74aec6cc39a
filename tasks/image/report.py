"""What a run of image classification reports: figures of each class, sample pictures, and the worst errors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from longseq.blocks.sharding import has_shards
from longseq.tasks.data.sampler import EvaluationSampler
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.datasets import EvaluationBatches
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.image.sources import Split
from longseq.tasks.image.transforms import denormalize, evaluation_transform
from longseq.tasks.training import targets
from longseq.tasks.training.class_report import ClassReport, to_csv
from longseq.tasks.training.logger import find_board
from longseq.tasks.training.system import write_text

COLUMNS = ("path", "true_class", "predicted_class", "probability", "loss")

_RIGHT, _WRONG, _NOTE = (20, 120, 40), (190, 30, 30), (90, 90, 90)  # colours of text
_TILE = 128  # the size of an image in the grid, in pixels
_LETTERS, _LINE = 14, 18  # the heights of letters and of a line; TensorBoard shows pictures at two thirds of their size


class ImageReport(ClassReport):
    """Adds to the figures of each class the number of images."""

    unit = "images"
    headline = ("top1", "top5", "accuracy", "f1", "f1_micro", "balanced_accuracy", "average_precision", "loss")

    def counts(self, module: ImageClassifier, info: DataInfo, split: str) -> dict[str, int]:
        counts = module.confusion_matrix
        if counts is None:
            return {}
        # with several labels, each matrix counts all images
        return {f"{split}/images": int((counts[0] if info.multi_label else counts).sum())}

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq export {checkpoint} format=onnx"]


@targets.register("callback")
class SamplePredictions(Callback):
    """Adds `val/samples`: images from the whole validation split, with the predicted and the true class.

    All runs on the same data show the same `count` images, in their validations 1, 2, 4, 8, ... Models that are sharded
    over processes have none.
    """

    def __init__(self, count: int = 16) -> None:
        self.count = count
        self._validations = 0
        self._examples: tuple[Tensor, Tensor] | None = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Averaged weights are in place here, but no longer at the end of the epoch.
        module: Any = pl_module
        board = find_board(trainer.loggers) if trainer.is_global_zero and not has_shards(module.backbone) else None
        self._validations += 1
        if board is None or self._validations & (self._validations - 1):
            return
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._examples = self._examples or pick_examples(datamodule, self.count)
        if self._examples is None:
            return
        converted = trainer.precision_plugin.convert_input(self._examples)
        images, true = trainer.strategy.batch_to_device(converted, module.device)
        devices = [module.device] if module.device.type == "cuda" else []
        with trainer.precision_plugin.forward_context(), torch.random.fork_rng(devices):
            logits = torch.cat([module(part).float() for part in images.split(datamodule.batch_size)])
        info: DataInfo = datamodule.info
        labels = [spell_targets(one, info) for one in (module.decide(logits), true)]
        picture = draw_predictions(denormalize(images, info).cpu(), *labels)
        board.experiment.add_image("val/samples", picture, trainer.global_step - 1)


@targets.register("callback")
class WorstErrors(Callback):
    """Lists the wrongly classified test images with the highest loss in `folder`/worst_errors_test.csv.

    The file has the columns `COLUMNS` and at most `rows` images. `test/worst_errors` is a picture of the first `count`.
    `probability` is of the predicted class, and `loss` the cross entropy; with several labels, `probability` is the
    highest of a wrong decision, and `loss` the mean over the labels. An image of a stream is named by its batch.
    """

    def __init__(self, folder: str, count: int = 16, rows: int = 100) -> None:
        self.folder, self.count, self.rows = Path(folder), count, rows
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
        images, true = batch
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
        pixels = denormalize(images[rows], datamodule.info).mul(255).round().to("cpu", torch.uint8)
        paths = [names[row] for row in rows.tolist()]
        labels = (spell_targets(one[rows], datamodule.info) for one in (true, predicted))
        columns: Any = (paths, *labels, probabilities[rows].tolist(), losses[rows].tolist(), pixels)
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
        rows = [[*one[:3], f"{one.probability:.6f}", f"{one.loss:.6f}"] for one in self._mistakes]
        write_text(self.folder / "worst_errors_test.csv", to_csv([COLUMNS, *rows]))
        board, shown = find_board(trainer.loggers), self._mistakes[: self.count]
        if shown and board is not None:
            picture = draw_predictions(
                torch.stack([one.pixels for one in shown]).float() / 255,
                [one.predicted for one in shown],
                [one.true for one in shown],
                notes=[os.path.basename(one.path) for one in shown],
            )
            board.experiment.add_image("test/worst_errors", picture, trainer.global_step)


class Mistake(NamedTuple):
    """A wrongly classified image: the columns of `WorstErrors`, and its pixels."""

    path: str
    true: str
    predicted: str
    probability: float
    loss: float
    pixels: Tensor  # uint8 [C, S, S]


def pick_examples(datamodule: Any, count: int) -> tuple[Tensor, Tensor] | None:
    """At most `count` validation images, uint8 [N, C, S, S], and their targets; None if no image can be read.

    They are spread evenly over the split. Of a stream, they are the first ones.
    """
    if datamodule.splits is None:
        # With StopIteration, Lightning would end the whole validation.
        batch = next(iter(datamodule.val_dataloader()), None)
        images, targets = (torch.empty(0), torch.empty(0)) if batch is None else batch
    else:
        split: Split = datamodule.splits.validation
        batches = EvaluationBatches(split, evaluation_transform(datamodule.info), datamodule.info)
        images, targets, _ = batches[EvaluationSampler(len(split), count).batch(0)]
    return (images[:count], targets[:count]) if len(images) else None


def spell_targets(targets: Tensor, info: DataInfo) -> list[str]:
    """The class of each image for targets [N], or all of its labels for [N, C] of 0 and 1."""
    names = info.class_names
    if targets.ndim == 1:
        return [names[number] for number in targets.tolist()]
    return [", ".join(names[number] for number in row.nonzero().flatten().tolist()) or "none" for row in targets]


def draw_predictions(
    pixels: Tensor, predicted: Sequence[str], true: Sequence[str], notes: Sequence[str] | None = None
) -> Tensor:
    """A grid of captioned images, uint8 [3, H, W], from pixels [N, C, h, w] in [0, 1], with `notes` below captions."""
    side, caption = _TILE, _LINE * (1 if notes is None else 2)
    columns = math.ceil(math.sqrt(len(pixels)))
    rows = math.ceil(len(pixels) / columns)
    canvas = Image.new("RGB", (columns * (side + 4), rows * (side + caption + 4)), "white")
    draw = ImageDraw.Draw(canvas)
    draw.font = ImageFont.load_default(_LETTERS)
    for i, image in enumerate(pixels):
        left, top = (i % columns) * (side + 4) + 2, (i // columns) * (side + caption + 4) + 2
        resampling = Image.Resampling.NEAREST if side >= image.shape[-1] else Image.Resampling.BOX
        tile = to_pil_image(image.clamp(0, 1)).convert("RGB").resize((side, side), resampling)
        canvas.paste(tile, (left, top))
        right = predicted[i] == true[i]
        text = predicted[i] if right else f"{predicted[i]} (is {true[i]})"
        draw.text((left, top + side), _fit(draw, text, side), fill=_RIGHT if right else _WRONG)
        if notes is not None:
            draw.text((left, top + side + _LINE), _fit(draw, notes[i], side), fill=_NOTE)
    return pil_to_tensor(canvas)


def _fit(draw: ImageDraw.ImageDraw, text: str, width: float) -> str:
    """The text in one line, cut to `width` pixels."""
    text = text.replace("\n", " ")  # Pillow cannot measure text of several lines
    while len(text) > 1 and draw.textlength(text) > width:
        text = text[:-2] + "…"
    return text
