"""The recipe that `recipe=auto` chooses by the number of images, their size, and whether the weights are trained.

Its ends are recipes that were used: those of the digits (1,295 images, batch 32) and of CIFAR-10 (45,000 images, batch
256, 100 epochs, light augmentation), and from 200,000 images on Vim's for ImageNet-1k (batch 1,024, 300 epochs, Mixup).
The batch of all three is the power of two nearest to the root of the number of images. Trained weights are tuned with
rates by layer and drop path as in MAE (He et al. 2022, arXiv:2111.06377, table 9); the rate goes with the root of the
batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from longseq.tasks.config import Choice
from longseq.tasks.image.info import DataInfo
from longseq.tasks.training.automatic import FIND, value_of

# From this number of images on, the recipe is that of ImageNet-1k.
LARGE = 200_000

# The training epochs up to a number of images: from scratch, and from trained weights.
EPOCHS = ((1_000, 300, 50), (5_000, 150, 20), (LARGE, 100, 10), (math.inf, 300, 5))

SMALLEST_BATCH, LARGEST_BATCH = 32, 1024

LIGHT = {
    "augment.scale": [0.35, 1.0],
    "augment.auto_augment": "rand-m9-n1-mstd0.5-inc1",
    "augment.erasing.prob": 0.0,
    "augment.repeats": 1,
    "augment.mixing.mixup": 0.0,
    "augment.mixing.cutmix": 0.0,
}
STRONG = {
    "augment.scale": [0.08, 1.0],
    "augment.auto_augment": "rand-m9-mstd0.5-inc1",
    "augment.erasing.prob": 0.25,
    "augment.repeats": 3,
    "augment.mixing.mixup": 0.8,
    "augment.mixing.cutmix": 1.0,
}


def starts_trained(config: Mapping[str, Any]) -> bool:
    """True if the model starts from trained weights: those of `init`, or the ones that timm has for the model."""
    return config.get("init") is not None or bool(config["model"].get("pretrained"))


def choose_recipe(config: Mapping[str, Any], info: DataInfo | None, parts: int = 1) -> Choice:
    """The values of the recipe's keys that say `auto`, for the data of `info`.

    Values that the recipe states are kept, and others follow from them: the learning rate from the batch. `parts` are
    the devices times the accumulated batches, over which the batch divides. Without `info`, the data is taken to be
    small: the values then serve to check the configuration before the data is open. ValueError, in one line, for a
    stream that does not tell its length.
    """
    images = 1_000 if info is None else info.sizes.get("train")
    if images is None:
        raise ValueError(
            f"recipe={config['recipe'].get('name')} needs the number of training images, which this stream does not "
            "tell: give data.train_samples=N, or another recipe such as recipe=vim"
        )
    recipe, trained, large = config["recipe"], starts_trained(config), images >= LARGE
    head_alone = recipe.get("freeze") == "body"
    batch = value_of(recipe, "batch_size", choose_batch(images, parts))
    scratch, tuned = next((scratch, tuned) for most, scratch, tuned in EPOCHS if images < most)
    epochs = value_of(recipe, "epochs", tuned if trained else scratch)
    length = _count_epochs(recipe, epochs, images, batch)
    rate = value_of(recipe, "learning_rate", _choose_rate(config, batch, trained, head_alone, large))
    values: dict[str, Any] = {
        "batch_size": batch,
        "epochs": epochs,
        "learning_rate": rate,
        "schedule.warmup_epochs": None if length is None else round(min(0.05 * length, 5 if large else math.inf), 4),
        "validate_every_epochs": 1 if large or length is None else max(1, int(length) // 50),
        "optimizer.weight_decay": 0.1 if large and not trained and _width(config) < 384 else 0.05,
        "optimizer.layer_decay": 0.75 if trained and not head_alone else None,
        "model.drop_path_rate": _choose_drop_path(config, trained and not head_alone),
        "loss.label_smoothing": 0.1,
        **(STRONG if large and not trained else LIGHT),
    }
    return Choice(values, _explain(config, info, images, values, trained))


def _count_epochs(recipe: Mapping[str, Any], epochs: int | None, images: int, batch: int) -> float | None:
    """The epochs of a run of `epochs`, or of the updates that the recipe states; None for a length in tokens."""
    if isinstance(recipe.get("updates"), int):
        return recipe["updates"] / max(1, images // batch)
    return None if recipe.get("tokens") is not None else epochs


def choose_batch(images: int, parts: int = 1) -> int:
    """The power of two nearest to the root of the number of images, from 32 to 1,024, which `parts` share evenly.

    Each part is even, because Mixup pairs the images of a batch. No batch is larger than the data set.
    """
    nearest = 2 ** round(math.log2(math.sqrt(max(1, images))))
    batch = min(max(nearest, SMALLEST_BATCH), LARGEST_BATCH, max(2, images))
    share = 2 * parts
    return max(1, batch // share) * share


def _choose_rate(config: Mapping[str, Any], batch: int, trained: bool, head_alone: bool, large: bool) -> float:
    """The rate at this batch."""
    if trained and not head_alone:
        return float(f"{1e-4 * math.sqrt(batch / SMALLEST_BATCH):.2g}")
    if large:
        return float(f"{1e-3 * batch / LARGEST_BATCH:.3g}")  # Vim's and DeiT's
    return 1e-3 if head_alone or _width(config) < 384 else 5e-4


def _choose_drop_path(config: Mapping[str, Any], tuned: bool) -> float | None:
    if not _is_ours(config):
        return None  # some models of timm have no such option
    return 0.1 if tuned else 0.05 if _width(config) >= 384 else None


def _width(config: Mapping[str, Any]) -> int:
    """The width of one of our models; 384, that of a small one, for a model of timm."""
    width = config["model"].get("embed_dim") or config["scale"].get("embed_dim")
    return width if _is_ours(config) and isinstance(width, int) else 384


def _is_ours(config: Mapping[str, Any]) -> bool:
    from longseq.plugin_models import TARGET  # it imports timm, which the keys beside this module do not need

    return str(config["model"].get("name")).startswith("longseq_") and TARGET not in config["model"]


def _explain(
    config: Mapping[str, Any], info: DataInfo | None, images: int, values: Mapping[str, Any], trained: bool
) -> str:
    """What was chosen and why, in one line."""
    recipe = config["recipe"]
    shown = {key: value_of(recipe, key, values[key]) for key in ("batch_size", "epochs", "learning_rate")}
    rate = "that is searched" if shown["learning_rate"] == FIND else shown["learning_rate"]
    updates = recipe.get("updates")
    count, unit = (updates, "update") if isinstance(updates, int) else (shown["epochs"], "epoch")
    length = f"{count:,} {unit}{'s' * (count != 1)}"
    strong = values["augment.repeats"] > 1
    why = "trained weights, tuned gently" if trained else "as for ImageNet" if strong else "few images, seen often"
    data = f"{images:,} images" + ("" if info is None else f" of {info.num_classes} classes at {info.img_size} px")
    return (
        f"recipe {recipe.get('name')} for {data} ({why}): batch {shown['batch_size']}, {length}, learning rate "
        f"{rate}, {'strong' if strong else 'light'} augmentation"
    )
