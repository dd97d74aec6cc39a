"""Pictures for TensorBoard: sample images with predictions."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.transforms import denormalize
from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.confusion import find_board, fit_text
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
        board = find_board(trainer)
        if not due or not trainer.is_global_zero or board is None or outputs is None:
            return
        images, targets = batch
        info = _info(trainer)
        pixels = denormalize(images[: self.count], info).cpu()
        module: Any = pl_module
        decided = module.decide(outputs[: self.count])
        predicted, true = (_spell(rows, info) for rows in (decided, targets[: self.count]))
        picture = draw_predictions(pixels, predicted, true)
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


def _info(trainer: Trainer) -> DataInfo:
    return trainer.datamodule.info  # type: ignore[attr-defined]


def _spell(decisions: Tensor, info: DataInfo) -> list[str]:
    """The class `[N]`, or all labels `[N, C]`, of each image."""
    names = info.class_names
    if not info.multi_label:
        return [names[number] for number in decisions.tolist()]
    return [", ".join(names[number] for number in row.nonzero().flatten().tolist()) or "none" for row in decisions]


def draw_predictions(pixels: Tensor, predicted: Sequence[str], true: Sequence[str]) -> Tensor:
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
        text = predicted[i] if right else f"{predicted[i]} (is {true[i]})"
        draw.text((left, top + side), fit_text(draw, text, side), fill=RIGHT if right else WRONG)
    return pil_to_tensor(canvas)
