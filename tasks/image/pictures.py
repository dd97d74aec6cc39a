"""Pictures for TensorBoard: sample images with predictions, and the confusion matrix."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.transforms import denormalize
from longseq.tasks.training import targets
from longseq.tasks.training.options import Range

RIGHT = (20, 120, 40)
WRONG = (190, 30, 30)

SMALLEST_TILE, LARGEST_TILE = 96, 128  # the size of an image in the grid, in pixels


@targets.register("callback")
class SamplePredictions(Callback):
    """Adds `val/samples`: images of the first validation batch, captioned with the predicted and the true class.

    A run gets about `pictures` of these pictures, evenly spaced, each with `count` images of at most 128 pixels: the
    event files stay small whatever the number of epochs and the size of images.
    """

    def __init__(self, count: Annotated[int, Range(1)] = 16, pictures: Annotated[int, Range(1)] = 20) -> None:
        if count < 1 or pictures < 1:
            raise ValueError(f"callbacks.samples: count={count} and pictures={pictures} must be at least 1")
        self.count = count
        self.pictures = pictures

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        due = batch_idx == 0 and self._is_due(*_count_validations(trainer, pl_module))
        board = _board(trainer)
        if not due or not trainer.is_global_zero or board is None or outputs is None:
            return
        images, targets = batch
        info = _info(trainer)
        pixels = denormalize(images[: self.count], info).cpu()
        predicted = outputs[: self.count].argmax(dim=1).tolist()
        picture = draw_predictions(pixels, predicted, targets[: self.count].tolist(), info.class_names)
        board.experiment.add_image("val/samples", picture, trainer.global_step - 1)

    def _is_due(self, number: int, total: int | None) -> bool:
        """True if the n-th validation gets a picture; in a run without an end, these are numbers 1, 2, 4, 8, ..."""
        if total is None or total < 1:
            return number & (number - 1) == 0
        return number % math.ceil(total / self.pictures) == 0


def _count_validations(trainer: Trainer, module: LightningModule) -> tuple[int, int | None]:
    """The number of this validation, counted from 1, and of the last one; validations after epochs count epochs."""
    if trainer.check_val_every_n_epoch is not None:
        return trainer.current_epoch + 1, trainer.max_epochs
    every: Any = trainer.val_check_batch  # type: ignore[attr-defined]
    end = getattr(module, "last_update", None)
    last = None if end is None else math.ceil(end * trainer.accumulate_grad_batches / every)
    return math.ceil((trainer.fit_loop.total_batch_idx + 1) / every), last


@targets.register("callback")
class ConfusionMatrix(Callback):
    """Adds `test/confusion_matrix`, rows true classes and columns predicted ones, for at most `max_classes` classes."""

    def __init__(self, max_classes: int = 100) -> None:
        self.max_classes = max_classes

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counts = pl_module.confusion_matrix
        board = _board(trainer)
        if not isinstance(counts, Tensor) or board is None or len(counts) > self.max_classes:
            return
        if trainer.is_global_zero:
            picture = draw_confusion_matrix(counts, _info(trainer).class_names)
            board.experiment.add_image("test/confusion_matrix", picture, trainer.global_step)


def _board(trainer: Trainer) -> TensorBoardLogger | None:
    """The logger that accepts pictures; None if the run has only other loggers."""
    return next((logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)


def _info(trainer: Trainer) -> DataInfo:
    return trainer.datamodule.info  # type: ignore[attr-defined]


def draw_predictions(
    pixels: Tensor, predicted: Sequence[int], true: Sequence[int], class_names: Sequence[str]
) -> Tensor:
    """A grid of captioned images, uint8 [3, H, W], from pixels [N, C, h, w] in [0, 1]."""
    side, caption = min(LARGEST_TILE, max(SMALLEST_TILE, pixels.shape[-1])), 14
    columns = math.ceil(math.sqrt(len(pixels)))
    rows = math.ceil(len(pixels) / columns)
    canvas = Image.new("RGB", (columns * (side + 4), rows * (side + caption + 4)), "white")
    draw = ImageDraw.Draw(canvas)
    for i, image in enumerate(pixels):
        left, top = (i % columns) * (side + 4) + 2, (i // columns) * (side + caption + 4) + 2
        resampling = Image.Resampling.NEAREST if side >= image.shape[-1] else Image.Resampling.BOX
        tile = to_pil_image(image.clamp(0, 1)).convert("RGB").resize((side, side), resampling)
        canvas.paste(tile, (left, top))
        right = predicted[i] == true[i]
        text = class_names[predicted[i]] if right else f"{class_names[predicted[i]]} (is {class_names[true[i]]})"
        draw.text((left, top + side), _fit(draw, text, side), fill=RIGHT if right else WRONG)
    return pil_to_tensor(canvas)


def draw_confusion_matrix(counts: Tensor, class_names: Sequence[str]) -> Tensor:
    """Counts [true, predicted] as a picture, uint8 [3, H, W], each row shaded by its share of the true class."""
    size = len(class_names)
    cell = max(6, min(48, 960 // size))
    labelled = cell >= 10
    margin = 110 if labelled else 24
    canvas = Image.new("RGB", (margin + size * cell + 8, margin + size * cell + 8), "white")
    draw = ImageDraw.Draw(canvas)
    shares = counts.double() / counts.sum(dim=1, keepdim=True).clamp(min=1)
    for row in range(size):
        for column in range(size):
            share = float(shares[row, column])
            left, top = margin + column * cell, margin + row * cell
            shade = (int(255 - 215 * share), int(255 - 150 * share), 255 - int(75 * share))
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=shade)
            if cell >= 28 and counts[row, column] > 0:
                ink = "white" if share > 0.5 else "black"
                text = str(int(counts[row, column]))
                draw.text((left + cell / 2, top + cell / 2), text, fill=ink, anchor="mm")
    if labelled:
        for i, name in enumerate(class_names):
            text = _fit(draw, name, margin - 8)
            draw.text((margin - 4, margin + (i + 0.5) * cell), text, fill="black", anchor="rm")
            _draw_upwards(canvas, text, margin + (i + 0.5) * cell, margin - 4)
    draw.text((4, 4), "row: true\ncolumn: predicted", fill="gray")
    return pil_to_tensor(canvas)


def _draw_upwards(canvas: Image.Image, text: str, centre: float, bottom: float) -> None:
    strip = Image.new("RGB", (int(bottom), 12), "white")
    ImageDraw.Draw(strip).text((0, 6), text, fill="black", anchor="lm")
    # Only the text itself is pasted, so that the caption in the corner is not covered.
    width = min(strip.width, int(ImageDraw.Draw(strip).textlength(text)) + 1)
    upright = strip.crop((0, 0, width, 12)).rotate(90, expand=True)
    canvas.paste(upright, (int(centre - 6), int(bottom - width)))


def _fit(draw: ImageDraw.ImageDraw, text: str, width: float) -> str:
    while len(text) > 1 and draw.textlength(text) > width:
        text = text[:-2] + "…"
    return text
