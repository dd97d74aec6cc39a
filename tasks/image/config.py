"""The keys that image classification reads of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from longseq.tasks.image.transforms import Augmentation
from longseq.tasks.training.keys import TaskKeys
from longseq.tasks.training.options import Range


@dataclass(frozen=True, kw_only=True)
class ImageDataKeys:
    """The keys of `data`; what they mean stands in `ImageDataModule`."""

    name: str
    source: str
    img_size: Annotated[int, Range(1)]
    root: str | None = None
    download: bool = False
    in_chans: Literal[1, 3] = 3
    num_classes: Annotated[int | None, Range(1)] = None
    class_map: str | Mapping[str, int] | None = None
    train_split: str = "train"
    val_split: str | None = "validation"
    test_split: str | None = None
    val_fraction: Annotated[float, Range(above=0, below=1)] = 0.1
    split_seed: int = 0
    train_samples: Annotated[int | None, Range(1)] = None
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)
    interpolation: str = "bicubic"
    crop_pct: Annotated[float, Range(above=0)] = 1.0
    eval_batch_size: Annotated[int | None, Range(1)] = None
    num_workers: Annotated[int | None, Range(0)] = None
    pin_memory: bool = True
    on_error: Literal["skip", "raise"] = "skip"


@dataclass(frozen=True, kw_only=True)
class ImageLossKeys:
    """The keys of `recipe.loss`: `bce` takes each class for a question of its own."""

    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0
    bce: bool = False


@dataclass(frozen=True, kw_only=True)
class MixingKeys:
    """The keys of `recipe.augment.mixing`; see `longseq.tasks.image.mixing.BatchMixing`."""

    mixup: Annotated[float, Range(0)] = 0.0
    cutmix: Annotated[float, Range(0)] = 0.0
    prob: Annotated[float, Range(0, 1)] = 1.0
    switch_prob: Annotated[float, Range(0, 1)] = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"


@dataclass(frozen=True, kw_only=True)
class ImageAugmentKeys(Augmentation):
    """The keys of `recipe.augment`: a sample's transforms, its repeats in an epoch, and the mixing of a batch."""

    repeats: Annotated[int, Range(1)] = 1
    mixing: MixingKeys = field(default_factory=MixingKeys)


@dataclass(frozen=True)
class ImageKeys(TaskKeys):
    """The keys of images."""

    data: type = ImageDataKeys
    loss: type | None = ImageLossKeys
    augment: type | None = ImageAugmentKeys

    def check(self, config: Mapping[str, Any]) -> None:
        if "source" not in config["data"]:
            raise ValueError(f"data={config['data'].get('name')} is no image data: give task=probe with it")
