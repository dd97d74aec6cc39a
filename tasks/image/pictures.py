"""Pictures for TensorBoard: sample images with predictions, and what the model looks at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from longseq.blocks.sharding import has_shards
from longseq.tasks.data.loader import likeliest_classes
from longseq.tasks.image.examples import pick_examples
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.saliency import saliency, shade
from longseq.tasks.image.transforms import denormalize
from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.charts import find_board, fit_text

RIGHT = (20, 120, 40)
WRONG = (190, 30, 30)
NOTE = (90, 90, 90)

TILE = 128  # the size of an image in the grid, in pixels
_LETTERS, _LINE = 14, 18  # the heights of letters and of a line; TensorBoard shows pictures at two thirds of their size


@targets.register("callback")
class SamplePredictions(Callback):
    """Adds `val/samples`: validation images of as many classes as possible, captioned with the predicted and the true
    class. `val/saliency` shows which of their pixels move the score of the predicted class.

    The images stay the same throughout the run, and in all runs on the same data. A run gets about `pictures` of these
    pictures, evenly spaced, each with `count` images of 128 pixels: the event files stay small whatever the
    number of epochs and the size of images. Models that are sharded over processes have no saliency.
    """

    def __init__(
        self,
        count: int = 16,
        pictures: int = 20,
        saliency: bool = True,
    ) -> None:
        self.count = count
        self.pictures = pictures
        self.saliency = saliency
        self._examples: tuple[Tensor, Tensor] | None = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Averaged weights are in place here, and no longer at the end of the epoch.
        board, sharded = find_board(trainer), has_shards(pl_module.backbone)  # type: ignore[arg-type]
        # A sharded model is whole only while all processes run it.
        takes_part = trainer.is_global_zero or sharded
        if not takes_part or board is None or not is_due(trainer, pl_module, self.pictures):
            return
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self._examples is None:
            self._examples = pick_examples(datamodule, self.count)
        if self._examples is None:
            return
        images, true = trainer.strategy.batch_to_device(
            trainer.precision_plugin.convert_input(self._examples), pl_module.device
        )
        logits, maps = self._run(trainer, pl_module, images, datamodule.batch_size, explained=not sharded)
        if not trainer.is_global_zero:
            return
        info: DataInfo = datamodule.info
        pixels = denormalize(images, info).cpu()
        module: Any = pl_module
        true = true if module.multi_label else likeliest_classes(true)
        labels = [spell_targets(targets, info) for targets in (module.decide(logits), true)]
        drawn = {"val/samples": pixels} | ({} if maps is None else {"val/saliency": shade(pixels, maps.cpu())})
        for name, shown in drawn.items():
            board.experiment.add_image(name, draw_predictions(shown, *labels), trainer.global_step - 1)

    def _run(
        self, trainer: Trainer, module: LightningModule, images: Tensor, batch_size: int, *, explained: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of images and their maps of saliency; as many at a time as the device trains on."""
        devices = [module.device] if module.device.type == "cuda" else []
        with trainer.precision_plugin.forward_context(), torch.random.fork_rng(devices):
            if not (self.saliency and explained):
                return torch.cat([module(part) for part in images.split(batch_size)]), None
            parts = [saliency(module, part) for part in images.split(batch_size)]
        logits, maps = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(maps)


def is_due(trainer: Trainer, module: LightningModule, pictures: int) -> bool:
    """True if this validation is one of about `pictures` of a run, evenly spaced; Lightning's sanity check is none."""
    if trainer.sanity_checking:
        return False
    number, total = _count_validations(trainer, module)
    return is_one_of(number, total, pictures)


def is_one_of(number: int, total: int | None, pictures: int) -> bool:
    """True if the n-th validation gets a picture; in a run without an end, these are numbers 1, 2, 4, 8, ..."""
    if total is None or total < 1:
        return number & (number - 1) == 0
    return number % math.ceil(total / pictures) == 0


def _count_validations(trainer: Trainer, module: LightningModule) -> tuple[int, int | None]:
    """The number of this validation, counted from 1, and of the last one; validations after epochs count epochs."""
    if trainer.check_val_every_n_epoch is not None:
        return trainer.current_epoch + 1, trainer.max_epochs
    every: Any = trainer.val_check_batch  # type: ignore[attr-defined]
    end = getattr(module, "last_update", None)
    last = None if end is None else math.ceil(end * trainer.accumulate_grad_batches / every)
    return math.ceil((trainer.fit_loop.total_batch_idx + 1) / every), last


def spell_targets(targets: Tensor, info: DataInfo) -> list[str]:
    """The class of each image, from targets [N], or all of its labels, from [N, C] of 0 and 1."""
    names = info.class_names
    if targets.ndim == 1:
        return [names[number] for number in targets.tolist()]
    return [", ".join(names[number] for number in row.nonzero().flatten().tolist()) or "none" for row in targets]


def draw_predictions(
    pixels: Tensor, predicted: Sequence[str], true: Sequence[str], notes: Sequence[str] | None = None
) -> Tensor:
    """A grid of captioned images, uint8 [3, H, W], from pixels [N, C, h, w] in [0, 1]; `notes` stand below the
    captions.
    """
    side, caption = TILE, _LINE * (1 if notes is None else 2)
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
        draw.text((left, top + side), fit_text(draw, text, side), fill=RIGHT if right else WRONG)
        if notes is not None:
            draw.text((left, top + side + _LINE), fit_text(draw, notes[i], side), fill=NOTE)
    return pil_to_tensor(canvas)
