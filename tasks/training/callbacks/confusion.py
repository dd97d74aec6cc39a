"""The confusion matrix of a classifier as a picture for TensorBoard."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor


class ConfusionMatrix(Callback):
    """Adds `test/confusion_matrix`, rows true classes and columns predicted ones, for at most `max_classes` classes.

    `val/confusion_matrix` is that of the validation before the best checkpoint, where the module has one; its numbers
    are in the run folder. Data with several labels a sample has no picture: it has a matrix for each label.
    """

    def __init__(self, max_classes: int = 100) -> None:
        self.max_classes = max_classes

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        board = find_board(trainer)
        if board is None or not trainer.is_global_zero:
            return
        info: Any = trainer.datamodule.info  # type: ignore[attr-defined]
        of_splits = {"val": getattr(pl_module, "val_confusion_matrix", None), "test": pl_module.confusion_matrix}
        for split, counts in of_splits.items():
            if isinstance(counts, Tensor) and counts.ndim == 2 and len(counts) <= self.max_classes:
                picture = draw_confusion_matrix(counts, info.class_names)
                board.experiment.add_image(f"{split}/confusion_matrix", picture, trainer.global_step)


def find_board(trainer: Trainer) -> TensorBoardLogger | None:
    """The logger that accepts pictures; None if the run has only other loggers."""
    return next((logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)


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
            text = fit_text(draw, name, margin - 8)
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


def fit_text(draw: ImageDraw.ImageDraw, text: str, width: float) -> str:
    """The text in one line, cut to `width` pixels."""
    text = text.replace("\n", " ")  # Pillow measures no text of several lines
    while len(text) > 1 and draw.textlength(text) > width:
        text = text[:-2] + "…"
    return text
