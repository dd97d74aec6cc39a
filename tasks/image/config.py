"""The configuration keys of image classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longseq.tasks.config import Choice, ClassifierGroup, Count, Keys, OpenKeys, Positive, Share, TaskKeys, key
from longseq.tasks.data.labels import ClassWeights, Sampling, check_label_keys
from longseq.tasks.image.augmentation import Augmentation, Part
from longseq.tasks.image.info import LEAST_CROP, DataInfo
from longseq.tasks.image.recipe import choose_recipe, starts_trained

Size = Count | Annotated[tuple[Count, Count], Field(strict=False)]
Set = dict[str, Any] | None

# Sources whose images have one class each. A plug-in's source may have several.
ONE_LABEL_SOURCES = ("digits", "fashion_mnist", "cifar10", "folder")

# The source of classes of the user's own, and the keys that name them.
OWN, DATAMODULE = "own", "datamodule"
OWN_KEYS = ("train_set", "val_set", "test_set", DATAMODULE)
# How a source names the labels of its images: of folders, and of tables.
LABEL_KEYS = ("class_map", "file_column", "label_column", "label_delimiter")

# The recipe that has no sense for weights that nobody has trained.
FINETUNE = "finetune"

# Each class has a name in the memory of every process, whether it has images or not.
MOST_CLASSES = 10_000_000


class ImageDataKeys(Keys):
    """The keys of `data`; `ImageDataModule` documents them."""

    name: str = key(..., "the name in tables")
    source: str = key(
        ..., "digits, fashion_mnist, cifar10, folder, csv, shards, hfds/NAME, hfids/NAME, wds/NAME, torch/NAME"
    )
    img_size: Count = key(..., "pixels of a side in training and evaluation")
    root: str | None = key(None, "the folder of the data")
    download: bool = key(False, "true: fetch the data if they are not in root")
    in_chans: Literal[1, 3] = key(3, "1: grey, 3: RGB")
    num_classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)] | None = key(None, "null: the number in the data")
    class_map: str | dict[Any, Annotated[int, Field(ge=0, lt=MOST_CLASSES)]] | None = key(
        None, "a .txt with one class per line, or {NAME: NUMBER}"
    )
    train_split: str = key("train", "the name of the training split")
    val_split: str | None = key("validation", "the name of the validation split")
    test_split: str | None = key(None, "the name of the test split; null: the validation images are tested")
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = key(
        0.1, "the part of the training images that validates, if there is no validation split"
    )
    split_seed: int = key(0, "which images these are", ge=0)
    train_samples: Count | None = key(None, "the images of an epoch, for streams of unknown length")
    mean: Annotated[Sequence[Part], Field(min_length=1)] = key((0.5,), "of each channel, on the scale from 0 to 1")
    std: Annotated[Sequence[Positive], Field(min_length=1)] = key((0.5,), "of each channel")
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos", "box", "hamming"] = key(
        "bicubic", "of resizing"
    )
    crop_pct: Annotated[float, Field(ge=LEAST_CROP, le=1)] = key(
        1.0, "the part of the shorter side that evaluation sees"
    )
    eval_batch_size: Count | None = key(None, "null: the training batch of one device")
    num_workers: Annotated[int, Field(ge=0)] | None = key(None, "null: one per core, at most 16 per device")
    decode: Literal["cpu", "gpu", "auto"] = key(
        "cpu", "gpu: nvJPEG and transforms of whole batches; auto: where possible"
    )
    pin_memory: bool = key(True, "copy batches to a GPU from pinned memory")
    on_error: Literal["skip", "raise"] = key(
        "skip", "skip: unreadable images are counted; raise: the first ends the run"
    )
    class_weights: ClassWeights = key("none", "balanced, a list, or {NAME: NUMBER}: weights of classes in the loss")
    sampling: Sampling = key(None, "balanced: an epoch draws each class equally often")
    multi_label: bool = key(False, "true: an image has any number of labels")
    file_column: str | None = key(None, "of source=csv; null: file_name")
    label_column: str | Annotated[list[str], Field(min_length=1)] | None = key(
        None, "null: label; or for several labels a list of columns that hold 1 or 0"
    )
    label_delimiter: str | None = key(None, "what stands between several labels in a cell")
    train_set: Set = key(None, "of source=own: {_target_: my_module.MyDataset, OPTION: VALUE}")
    val_set: Set = key(None, "as train_set; null: val_fraction of the training set")
    test_set: Set = key(None, "as train_set; null: the validation set")
    datamodule: Set = key(None, "a LightningDataModule in place of all three")

    @model_validator(mode="after")
    def _agree(self) -> ImageDataKeys:
        file = ("file_column", self.file_column or "file_name")
        check_label_keys(self.multi_label, self.label_column, self.label_delimiter, file)
        if self.multi_label and (self.source in ONE_LABEL_SOURCES or "/" in self.source):
            raise ValueError(f"multi_label=true: source={self.source} has one class an image: give source=csv")
        if self.class_map is not None and self.source in ("csv", "shards"):
            raise ValueError(f"class_map is for folders: source={self.source} has its own labels")
        return self


def per_channel(name: str, values: Sequence[float], in_chans: int) -> list[float]:
    """`data.mean` or `data.std` with one value for each channel: repeated for RGB, averaged for grey."""
    if len(values) not in (1, 3):
        raise ValueError(f"data.{name} has {len(values)} values: give 1 or 3")
    if len(values) == in_chans:
        return [float(value) for value in values]
    return [sum(values) / len(values)] * in_chans


class ImageLossKeys(Keys):
    """The keys of `recipe.loss`."""

    label_smoothing: Share = key(0.0, "the part of a target's probability that all classes share")
    bce: bool = key(False, "binary cross entropy, one decision for each class")


class MixingKeys(Keys):
    """The keys of `recipe.augment.mixing`; see `longseq.tasks.image.mixing.BatchMixing`."""

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
        if config["recipe"]["name"] == FINETUNE and not starts_trained(config):
            raise ValueError(
                f"recipe={FINETUNE} begins with trained weights: give init=FILE, or model=timm model.name=NAME "
                "model.pretrained=true"
            )
        if config["init"] is not None and config["model"].get("pretrained"):
            raise ValueError("init and model.pretrained=true both give the first weights: leave one out")

    def choose(self, config: Mapping[str, Any], info: DataInfo | None, parts: int) -> Choice:
        return choose_recipe(config, info, parts)
