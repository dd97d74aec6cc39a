"""The keys of image classification, the recipe that `recipe=auto` chooses, and what a model keeps of its data.

The recipe depends on the number of images, and on whether the weights are trained. It interpolates between tested
recipes: the digits (1,295 images, batch 32), CIFAR-10 (45,000 images, batch 256, 100 epochs, light augmentation), and
from 200,000 images on Vim's for ImageNet-1k (batch 1,024, 300 epochs, Mixup). The batch of all three is the power of
two nearest to the root of the number of images. Trained weights are tuned with layer-wise rates and drop path as in MAE
(He et al. 2022, arXiv:2111.06377, table 9); the rate grows with the root of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longseq.plugin_models import TARGET
from longseq.tasks.config import ClassifierGroup, Count, Keys, OpenKeys, Positive, Share, TaskKeys, key
from longseq.tasks.data.info import Info
from longseq.tasks.data.labels import SEVERAL_LABELS, ClassWeights, Sampling
from longseq.tasks.training.automatic import value_of

Size = Count | Annotated[tuple[Count, Count], Field(strict=False)]
Interpolation = Literal["bicubic", "bilinear", "nearest", "lanczos", "box", "hamming"]
Numbers = dict[Any, Annotated[int, Field(ge=0)]]  # of classes by their names
Set = dict[str, Any] | None
Names = Annotated[list[str], Field(min_length=1)]
Part = Annotated[float, Field(ge=0, le=1)]
Span = Annotated[tuple[Positive, Positive], Field(strict=False)]  # the smallest and the largest value

OWN = "own"  # the source for Datasets of the user
# The keys for the labels of folders and tables.
LABEL_KEYS = ("class_map", "file_column", "label_column", "label_delimiter")


class ImageDataKeys(Keys):
    """The keys of `data`; `ImageDataModule` documents them."""

    name: str = key(..., "the name in tables")
    source: str = key(..., "digits, folder, csv, own, hfds/, hfids/, wds/, torch/NAME")
    img_size: Count = key(..., "pixels of a side in training and evaluation")
    root: str | None = key(None, "the folder of the data")
    download: bool = key(False, "true: fetch the data if they are not in root")
    in_chans: Literal[1, 3] = key(3, "1: grey, 3: RGB")
    num_classes: Count | None = key(None, "null: the number in the data")
    class_map: str | Numbers | None = key(None, "a .txt with one class per line, or {NAME: NUMBER}")
    train_split: str = key("train", "the name of the training split")
    val_split: str | None = key("validation", "the name of the validation split")
    test_split: str | None = key(None, "the name of the test split; null: the validation images are tested")
    val_fraction: float = key(0.1, "the part of the training images that validates without val_split", gt=0, lt=1)
    split_seed: int = key(0, "which images these are", ge=0)
    train_samples: Count | None = key(None, "the images of an epoch, for streams of unknown length")
    mean: Annotated[Sequence[Part], Field(min_length=1)] = key((0.5,), "of each channel, on the scale from 0 to 1")
    std: Annotated[Sequence[Positive], Field(min_length=1)] = key((0.5,), "of each channel")
    interpolation: Interpolation = key("bicubic", "of resizing")
    crop_pct: Annotated[float, Field(ge=0.1, le=1)] = key(1.0, "the part of the shorter side that evaluation sees")
    eval_batch_size: Count | None = key(None, "null: the training batch of one device")
    num_workers: Annotated[int, Field(ge=0)] | None = key(None, "null: one per core, at most 16 per device")
    decode: Literal["cpu", "gpu"] = key("cpu", "gpu: nvJPEG and transforms of whole batches")
    pin_memory: bool = key(True, "copy batches to a GPU from pinned memory")
    on_error: Literal["skip", "raise"] = key("skip", "raise: the first unreadable image ends the run")
    class_weights: ClassWeights = key("none", "balanced, a list, or {NAME: NUMBER}: weights of classes in the loss")
    sampling: Sampling = key(None, "balanced: an epoch draws each class equally often")
    multi_label: bool = key(False, "true: an image has any number of labels")
    file_column: str = key("file_name", "of source=csv: the column of paths; the default is Hugging Face's")
    label_column: str | Names | None = key(None, "null: label; or for several labels a list of columns of 1 and 0")
    label_delimiter: str | None = key(None, "what separates several labels in a cell")
    train_set: Set = key(None, "of source=own: {_target_: my_module.MyDataset, OPTION: VALUE}")
    val_set: Set = key(None, "as train_set; null: val_fraction of the training set")
    test_set: Set = key(None, "as train_set; null: the validation set")

    @model_validator(mode="after")
    def _agree(self) -> ImageDataKeys:
        if not self.multi_label and (isinstance(self.label_column, list) or self.label_delimiter is not None):
            raise ValueError(SEVERAL_LABELS)
        if self.class_map is not None and self.source == "csv":
            raise ValueError("class_map is for folders: source=csv has its own labels")
        return self


class ImageLossKeys(Keys):
    """The keys of `recipe.loss`."""

    label_smoothing: Share = key(0.0, "the part of a target's probability that all classes share")
    bce: bool = key(False, "binary cross entropy, one decision for each class")


class ErasingKeys(Keys):
    """The keys of `recipe.augment.erasing`, timm's RandomErasing."""

    prob: Part = key(0.0, "the share of the images of which a rectangle is erased")
    mode: Literal["const", "rand", "pixel"] = key("const", "zeros, a random colour, or random pixels")
    count: Count = key(1, "the most rectangles")


class Augmentation(Keys):
    """The random transforms of a sample; the defaults change only the size."""

    crop: Literal["random_resized", "padded", "center"] = key(
        "center", "random_resized: Inception's; padded: a random crop of the whole image (DeiT III's); center: none"
    )
    scale: Span = key((0.08, 1.0), "of random_resized: the least and the largest part of an image's area")
    ratio: Span = key((3 / 4, 4 / 3), "of random_resized: the width over the height")
    padding: int = key(4, "of padded: the pixels that are added at each side", ge=0)
    padding_mode: Literal["constant", "reflect", "edge", "symmetric"] = key("constant", "of padded")
    hflip: Part = key(0.0, "the share of the images that are mirrored")
    vflip: Part = key(0.0, "the share of the images that are turned upside down")
    color_jitter: Part = key(0.0, "timm ignores it together with RandAugment")
    auto_augment: str | None = key(None, "a policy of timm such as rand-m9-mstd0.5-inc1, 3a or augmix-m3-w3")
    erasing: ErasingKeys = key(ErasingKeys(), "random erasing")


class MixingKeys(Keys):
    """The keys of `recipe.augment.mixing`; see `longseq.tasks.image.transforms.BatchMixing`."""

    mixup: float = key(0.0, "alpha of Mixup; 0: off", ge=0)
    cutmix: float = key(0.0, "alpha of CutMix; 0: off", ge=0)
    prob: Part = key(1.0, "the share of the batches that are mixed")
    switch_prob: Part = key(0.5, "of these, the share with CutMix if both are on")
    mode: Literal["batch", "pair", "elem"] = key("batch", "what has parameters of its own")


class ImageAugmentKeys(Augmentation):
    """The keys of `recipe.augment`: transforms of a sample, its repeats in an epoch, and the mixing of a batch."""

    repeats: Count = key(1, "how often each image is drawn in an epoch, which keeps its number of samples")
    mixing: MixingKeys = key(MixingKeys(), "Mixup and CutMix")


class ModelOptions(OpenKeys):
    """Options of any image model. A null option has the value of the recipe (`recipe.model`), or else of the model.

    Other options of the model's constructor pass through.
    """

    patch_size: Size | None = key(None, "null: 16 from 128 px on, 4 below, 6 for the 8 px of digits")
    drop_rate: Share | None = key(None, "before the head")
    drop_path_rate: Share | None = key(None, "stochastic depth")


class ModelKeys(ModelOptions):
    """The keys of `model`; `longseq.backbones.image.ImageBackbone`, or the model of timm, has the other options."""

    name: str = key(..., "a model of timm, ours among them")
    label: str = key(..., "the name in tables")
    pretrained: bool = key(False, "of timm's models: begin with trained weights")
    embed_dim: Count | None = key(None, "the width")
    depth: Count | None = key(None, "the number of blocks")
    stride: Size | None = key(None, "null: the patch size, 1 for the 8 px of digits; smaller: patches overlap")
    direction: Literal["bidirectional", "forward", "cross", "alternating"] | None = key(None, "how patches are read")


LARGE = 200_000  # from this number of images on, the recipe of ImageNet-1k is used

# (images below this number, epochs from scratch, epochs from trained weights)
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


@dataclass(frozen=True)
class ImageKeys(TaskKeys):
    """The keys of image classification."""

    data: type[Keys] = ImageDataKeys
    model: Any = ModelKeys
    group: type[ClassifierGroup] = ClassifierGroup
    loss: type[Keys] | None = ImageLossKeys
    augment: type[Keys] | None = ImageAugmentKeys
    recipe_model: type[Keys] | None = ModelOptions

    def check(self, config: Mapping[str, Any]) -> None:
        from longseq.tasks.training.metrics import check_metrics

        group = config["task"]
        check_metrics(group["metric"], group["metrics"], multi_label=bool(config["data"]["multi_label"]))
        if config["recipe"]["name"] == "finetune" and not starts_trained(config):
            raise ValueError("recipe=finetune begins with trained weights: give init=FILE or model.pretrained=true")

    def choose(self, config: Mapping[str, Any], info: DataInfo | None, parts: int) -> dict[str, Any]:
        """As `TaskKeys.choose`; what the recipe states is kept, and others follow from it, as the rate from the batch.

        Before the data is open, 1,000 images are assumed. ValueError for a stream of unknown length.
        """
        images = 1_000 if info is None else info.sizes.get("train")
        recipe, model = config["recipe"], config["model"]
        if images is None:
            raise ValueError(f"recipe={recipe.get('name')} needs the number of images: give data.train_samples=N")
        large, head_only, trained = images >= LARGE, recipe.get("freeze") == "body", starts_trained(config)
        tuned = trained and not head_only
        ours = str(model.get("name")).startswith("longseq_") and TARGET not in model
        width = (model.get("embed_dim") or config["scale"].get("embed_dim")) if ours else None
        narrow = isinstance(width, int) and width < 384
        batch = value_of(recipe, "batch_size", choose_batch(images, parts))
        scratch_epochs, tuned_epochs = next((scratch, tuned) for most, scratch, tuned in EPOCHS if images < most)
        epochs = value_of(recipe, "epochs", tuned_epochs if trained else scratch_epochs)
        if isinstance(recipe.get("updates"), int):
            length: float | None = recipe["updates"] / max(1, images // batch)
        else:
            length = epochs if recipe.get("tokens") is None else None
        if tuned:
            rate = float(f"{1e-4 * math.sqrt(batch / SMALLEST_BATCH):.2g}")
        elif large:
            rate = float(f"{1e-3 * batch / LARGEST_BATCH:.3g}")  # as in Vim and DeiT
        else:
            rate = 1e-3 if head_only or narrow else 5e-4
        warmup = None if length is None else round(min(0.05 * length, 5 if large else math.inf), 4)
        drop_path = 0.1 if tuned else None if narrow else 0.05
        values: dict[str, Any] = {
            "batch_size": batch,
            "epochs": epochs,
            "learning_rate": rate,
            "schedule.warmup_epochs": warmup,
            "validate_every_epochs": 1 if large or length is None else max(1, int(length) // 50),
            "optimizer.weight_decay": 0.1 if large and not trained and narrow else 0.05,
            "optimizer.layer_decay": 0.75 if tuned else None,
            "model.drop_path_rate": drop_path if ours else None,  # some models of timm have no such option
            "loss.label_smoothing": 0.1,
            **(STRONG if large and not trained else LIGHT),
        }
        return {f"recipe.{key}": value for key, value in values.items()}


def starts_trained(config: Mapping[str, Any]) -> bool:
    """True if the model starts from trained weights: from `init`, or timm's."""
    return config.get("init") is not None or bool(config["model"].get("pretrained"))


def choose_batch(images: int, parts: int = 1) -> int:
    """The power of two nearest to the root of the number of images, from 32 to 1,024, divisible by `parts`.

    Each part is even, because Mixup pairs the images of a batch. No batch is larger than the data set.
    """
    nearest = 2 ** round(math.log2(math.sqrt(max(1, images))))
    batch = min(max(nearest, SMALLEST_BATCH), LARGEST_BATCH, max(2, images))
    share = 2 * parts
    return max(1, batch // share) * share


_SHARED = ("img_size", "in_chans", "interpolation", "crop_pct", "multi_label")  # of `DataInfo` and the keys of `data`


@dataclass(frozen=True)
class DataInfo(Info):
    """The classes and the preprocessing of image data, kept by models, checkpoints and exported files.

    `img_size` is [height, width] for images that are not square. `mean` and `std` are per channel, of pixels in [0, 1].
    `crop_mode` is timm's: center, squash or border. `sizes` has the number of images in each split, None if unknown.
    With `multi_label` an image has any number of the classes. `class_weights` has the weight of each class in the loss,
    None if all are 1. `thresholds` are the probabilities from which each label, or the second of two classes, is
    predicted; None for one half, or for the most probable class.
    """

    class_names: list[str]
    num_classes: int
    img_size: int | list[int]
    in_chans: int
    mean: list[float]
    std: list[float]
    interpolation: str
    crop_pct: float
    multi_label: bool = False
    class_weights: list[float] | None = None
    thresholds: list[float] | None = None
    crop_mode: str = "center"

    _changed = "other files or labels"
    _meaning = ("class_names", "multi_label")

    @classmethod
    def from_keys(cls, keys: ImageDataKeys, *, class_names: list[str], **values: Any) -> DataInfo:
        """The info of data opened with these keys of `data`; `values` are the fields that `keys` does not have."""
        values |= {name: getattr(keys, name) for name in _SHARED}
        values |= {name: per_channel(name, getattr(keys, name), keys.in_chans) for name in ("mean", "std")}
        return cls(class_names=class_names, num_classes=len(class_names), **values)

    @property
    def sides(self) -> tuple[int, int]:
        """The height and width of the images that the model reads."""
        height, width = (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size
        return height, width

    @property
    def side(self) -> int:
        """The side of the square images that the model reads; ValueError for others."""
        height, width = self.sides
        if height != width:
            raise ValueError(f"img_size={list(self.sides)} is not square: only predict and export read such images")
        return height

    def to_keys(self) -> dict[str, Any]:
        """The keys of `data` that transform other images in the same way."""
        return {"name": "images", **{key: getattr(self, key) for key in (*_SHARED, "mean", "std")}}

    def describe(self) -> str:
        """The data in a few words."""
        size = " x ".join(str(side) for side in dict.fromkeys(self.sides))
        return f"{size} px, {self.num_classes} {'labels' if self.multi_label else 'classes'}"


def per_channel(name: str, values: Sequence[float], in_chans: int) -> list[float]:
    """`data.mean` or `data.std` with one value per channel: repeated for RGB, averaged for grey."""
    if len(values) not in (1, 3):
        raise ValueError(f"data.{name} has {len(values)} values: give 1 or 3")
    if len(values) == in_chans:
        return [float(value) for value in values]
    return [sum(values) / len(values)] * in_chans
