"""The configuration keys of image classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from longseq.arguments import Inert
from longseq.tasks.data.labels import ClassWeights, Sampling, check_balance, check_label_keys
from longseq.tasks.image.augmentation import Augmentation
from longseq.tasks.image.info import LEAST_CROP, DataInfo
from longseq.tasks.image.recipe import choose_recipe, starts_trained
from longseq.tasks.training.automatic import Choice
from longseq.tasks.training.command import refuse_inert
from longseq.tasks.training.keys import ClassifierGroup, TaskKeys
from longseq.tasks.training.options import Length, Off, Range, read, read_beside, refuse_unknown, spell

Size = Annotated[int, Range(1)] | tuple[Annotated[int, Range(1)], Annotated[int, Range(1)]]
Share = Annotated[float, Range(0, below=1)]

# Sources whose images have one class each. A plug-in's source may have several.
ONE_LABEL_SOURCES = ("digits", "fashion_mnist", "cifar10", "folder")

# The source of classes of the user's own, and the keys that name them.
OWN, DATAMODULE = "own", "datamodule"
# How a source names the labels of its images: of folders, and of tables.
LABEL_KEYS = ("class_map", "file_column", "label_column", "label_delimiter")

OWN_KEYS = ("train_set", "val_set", "test_set", DATAMODULE)

# The recipe that has no sense for weights that nobody has trained.
FINETUNE = "finetune"

# Options of our image models that are set by the data and by the group `mixer`.
_DECIDED = ("img_size", "in_chans", "num_classes", "mixer", "mixer_options")

# Keys of `data` that the digits do not heed, with the values that other data has by default.
_OF_LARGER_DATA: dict[str, tuple[Any, ...]] = {
    "download": (False,),
    "val_fraction": (0.1,),
    "split_seed": (0,),
    "train_split": ("train",),
    "val_split": ("validation", None),
    "test_split": ("test", None),
}


# Each class has a name in the memory of every process, whether it has images or not.
MOST_CLASSES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class ImageDataKeys:
    """The keys of `data`; `ImageDataModule` documents them."""

    name: str
    source: str
    img_size: Annotated[int, Range(1)]
    root: str | None = None
    download: bool = False
    in_chans: Literal[1, 3] = 3
    num_classes: Annotated[int | None, Range(1, MOST_CLASSES)] = None
    class_map: str | Mapping[str, Annotated[int, Range(0, MOST_CLASSES - 1)]] | None = None
    train_split: str = "train"
    val_split: str | None = "validation"
    test_split: str | None = None
    val_fraction: Annotated[float, Range(above=0, below=1)] = 0.1
    split_seed: Annotated[int, Range(0)] = 0
    train_samples: Annotated[int | None, Range(1)] = None
    mean: Annotated[Sequence[float], Range(0, 1), Length(1)] = (0.5,)
    std: Annotated[Sequence[float], Range(above=0), Length(1)] = (0.5,)
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos", "box", "hamming"] = "bicubic"
    crop_pct: Annotated[float, Range(LEAST_CROP, 1)] = 1.0
    eval_batch_size: Annotated[int | None, Range(1)] = None
    num_workers: Annotated[int | None, Range(0)] = None
    decode: Literal["cpu", "gpu", "auto"] = "cpu"  # of runs from before there was a choice
    pin_memory: bool = True
    on_error: Literal["skip", "raise"] = "skip"
    class_weights: ClassWeights = "none"
    sampling: Sampling = None
    multi_label: bool = False
    file_column: str | None = None
    label_column: str | Annotated[list[str], Length(1)] | None = None
    label_delimiter: str | None = None
    train_set: Mapping[str, Any] | None = None
    val_set: Mapping[str, Any] | None = None
    test_set: Mapping[str, Any] | None = None
    datamodule: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_balance(self.sampling, self.class_weights)
        file = ("file_column", self.file_column or "file_name")
        check_label_keys(self.multi_label, self.label_column, self.label_delimiter, file)
        tables = {name: getattr(self, name) for name in ("file_column", "label_column", "label_delimiter")}
        for name, value in tables.items():
            if value is not None and self.source != "csv":
                raise ValueError(
                    f"data.{name}={spell(value)} is of a table of images, and data.source={self.source} has none: give "
                    "data.source=csv"
                )
        if self.multi_label and (self.source in ONE_LABEL_SOURCES or "/" in self.source):
            raise ValueError(
                f"data.multi_label=true: data.source={self.source} has one class an image: give data.source=csv"
            )
        for key, default in _OF_LARGER_DATA.items() if self.source == "digits" else ():
            if (value := getattr(self, key)) not in default:
                raise ValueError(
                    f"data.{key}={spell(value)} has no effect: data.source=digits comes with splits of its own; "
                    "leave it out"
                )
        prefix, slash, name = self.source.partition("/")
        if slash and not name.strip("/ "):
            raise ValueError(f"data.source={self.source} lacks the name of a data set: give data.source={prefix}/NAME")
        check_own_keys(self)
        if self.class_map is not None and self.source in ("csv", "shards"):
            raise ValueError(
                f"data.class_map={spell(self.class_map)} is for folders: data.source={self.source} has its own labels"
            )


def _no_class(given: str, key: str) -> str:
    return (
        f"{given} names no class: give plugins=[my_module] 'data.{key}={{_target_: my_module.MyDataset}}', or "
        "'data.datamodule={_target_: my_module.MyDataModule}'"
    )


def require_train_set(data: Mapping[str, Any]) -> None:
    """ValueError, in one line, for `data=own` with nothing to train on; a test needs no more than a set of its own."""
    from longseq.tasks.training.targets import is_named

    if data.get("source") == OWN and not any(is_named(data.get(key)) for key in ("train_set", DATAMODULE)):
        raise ValueError(_no_class("data=own", "train_set"))


def check_own_keys(keys: ImageDataKeys) -> None:
    """ValueError for classes of the user's own beside other data, and for `data.source=own` without any."""
    from longseq.tasks.training.targets import is_named  # it imports Lightning, which the keys do not need

    named = [key for key in OWN_KEYS if is_named(getattr(keys, key))]
    if keys.source != OWN:
        if named:
            raise ValueError(f"data.{named[0]} is of data=own, and data.source={keys.source} reads none: leave it out")
        return
    if not named:
        raise ValueError(_no_class("data.source=own", "test_set"))
    if DATAMODULE in named and len(named) > 1:
        raise ValueError(f"data.datamodule has all splits: leave data.{named[0]} out")
    if DATAMODULE in named and keys.sampling is not None:
        raise ValueError("data.sampling is not for data.datamodule, whose loaders choose their samples: leave it out")
    if DATAMODULE in named and keys.class_weights == "balanced":
        raise ValueError("data.class_weights=balanced does not know the labels of data.datamodule: give {NAME: NUMBER}")


def per_channel(name: str, values: Sequence[float], in_chans: int) -> list[float]:
    """`data.mean` or `data.std` with one value for each channel: repeated for RGB, averaged for grey."""
    if len(values) not in (1, 3):
        raise ValueError(f"data.{name} has {len(values)} values: give 1 or 3")
    if len(values) == in_chans:
        return [float(value) for value in values]
    return [sum(values) / len(values)] * in_chans


@dataclass(frozen=True, kw_only=True)
class ImageLossKeys:
    """The keys of `recipe.loss`; `bce` is binary cross entropy, one decision for each class."""

    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0
    bce: bool = False


@dataclass(frozen=True, kw_only=True)
class MixingKeys:
    """The keys of `recipe.augment.mixing`; see `longseq.tasks.image.mixing.BatchMixing`."""

    mixup: Annotated[float, Range(0), Off()] = 0.0
    cutmix: Annotated[float, Range(0), Off()] = 0.0
    prob: Annotated[float, Range(0, 1)] = 1.0
    switch_prob: Annotated[float, Range(0, 1)] = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"


@dataclass(frozen=True, kw_only=True)
class ImageAugmentKeys(Augmentation):
    """The keys of `recipe.augment`: a sample's transforms, its repeats in an epoch, and the mixing of a batch."""

    # As of `LongseqModelOptions`.
    inert_with: ClassVar[Inert] = {
        **dict.fromkeys(("scale", "ratio"), ({"crop": ("padded", "center")},)),
        **dict.fromkeys(("padding", "padding_mode"), ({"crop": ("random_resized", "center")},)),
    }

    repeats: Annotated[int, Range(1)] = 1
    mixing: MixingKeys = field(default_factory=MixingKeys)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of any image model. A null option has the value of the recipe (`recipe.model`), or else of the model."""

    patch_size: Size | None = None
    drop_rate: Share | None = None
    drop_path_rate: Share | None = None


@dataclass(frozen=True, kw_only=True)
class LongseqModelOptions(ModelOptions):
    """Options of our image models; `longseq.backbones.image.ImageBackbone` has more."""

    # Options that have no effect beside others, which `refuse_inert` refuses.
    inert_with: ClassVar[Inert] = {
        "share_directions": ({"direction": ("forward", "alternating")},),
        "merge": ({"direction": ("forward", "alternating")},),
    }

    embed_dim: Annotated[int | None, Range(1)] = None
    depth: Annotated[int | None, Range(1)] = None
    stride: Size | None = None
    direction: Literal["bidirectional", "forward", "cross", "alternating"] | None = None
    merge: Literal["sum", "mean"] | None = None
    class_token: Literal["middle", "first", "none"] | None = None
    reg_tokens: Annotated[int | None, Range(0)] = None
    global_pool: Literal["token", "avg", "max", "avgmax", "map"] | None = None
    pool_num_heads: Annotated[int | None, Range(1)] = None
    mlp_ratio: Annotated[float | None, Range(0)] = None
    init_values: Annotated[float | None, Range(above=0)] = None
    pos_drop_rate: Share | None = None
    patch_drop_rate: Share | None = None
    proj_drop_rate: Share | None = None
    recompute: Literal["none", "mixer", "block"] | None = None
    backend: Literal["auto", "torch", "reference", "triton"] | None = None


@dataclass(frozen=True, kw_only=True)
class TimmModelOptions(ModelOptions):
    """Options of timm's models; the constructor of the model has more."""

    pretrained: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """The keys of `model` that are not options of a constructor."""

    name: str
    label: str


def _check_model(config: Mapping[str, Any]) -> None:
    """ValueError for an unknown model, and for options of `model` or `recipe.model` that the model does not have."""
    # The keys themselves need none of these, which take seconds to import.
    from longseq.backbones.image import ImageBackbone
    from longseq.plugin_models import TARGET
    from longseq.tasks.image.model import check_model_name, model_options, own_arguments

    own = [entry.name for entry in fields(ModelName)]
    if TARGET in config["model"]:
        read(ModelName, {key: value for key, value in config["model"].items() if key in own}, "model")
        own_arguments(config, {"num_classes": 2, "in_chans": 3, "img_size": 1})
        return
    name = read(ModelName, {key: value for key, value in config["model"].items() if key in own}, "model").name
    check_model_name(name)
    given = {key: value for key, value in config["model"].items() if key not in own}
    for place, options in (("model", given), ("recipe.model", config["recipe"].get("model") or {})):
        chosen = {key: value for key, value in options.items() if value is not None}
        if name.startswith("longseq_"):
            read_beside(LongseqModelOptions, ImageBackbone, chosen, place, given=_DECIDED)
        else:
            known = [entry.name for entry in fields(TimmModelOptions)]
            of_ours = {entry.name for entry in fields(LongseqModelOptions)}.difference(known, model_options(name))
            if place == "recipe.model" and (key := next((key for key in chosen if key in of_ours), None)):
                raise ValueError(f"the recipe sets {key}, which {name} does not have: add {place}.{key}=null")
            if key := next((key for key in chosen if key in of_ours), None):
                raise ValueError(
                    f"{place}.{key} is no option of {name}, a model of timm: give model=timm model.name={name}, and "
                    "options that it has"
                )
            read(TimmModelOptions, {key: value for key, value in chosen.items() if key in known}, place)
            refuse_unknown(chosen, dict.fromkeys([*known, *model_options(name)]), place)
    if name.startswith("longseq_"):
        _check_pool_heads(config)
        chosen = {key: value for key, value in given.items() if value is not None}
        refuse_inert("model", (config["recipe"].get("model") or {}) | chosen, LongseqModelOptions.inert_with)


def _check_augmentation(chosen: Mapping[str, Any]) -> None:
    """ValueError, in one line, if a person gave an option of the augmentation that has no effect beside the others."""
    policy = chosen.get("auto_augment")
    jitters = chosen.get("color_jitter") and policy is not None and "3a" not in policy
    # timm's policies change colours in place of color_jitter, but for 3a.
    replaced: Inert = {"color_jitter": ({"auto_augment": (policy,)},)} if jitters else {}
    refuse_inert("recipe.augment", chosen, {**ImageAugmentKeys.inert_with, **replaced})


def _check_pool_heads(config: Mapping[str, Any]) -> None:
    """ValueError for heads of a pooling by attention that the model does not have."""
    places = {"recipe.model": config["recipe"].get("model") or {}, "model": config["model"]}
    heads = {place: keys["pool_num_heads"] for place, keys in places.items() if keys.get("pool_num_heads") is not None}
    pools = [keys["global_pool"] for keys in places.values() if keys.get("global_pool") is not None]
    if heads and pools[-1:] != ["map"]:
        place, count = next(reversed(heads.items()))
        raise ValueError(
            f"{place}.pool_num_heads={count} has no effect without attention that pools: give model.global_pool=map, "
            f"or leave it out"
        )


@dataclass(frozen=True)
class ImageKeys(TaskKeys):
    """The keys of image classification."""

    data: type = ImageDataKeys
    group: type = ClassifierGroup
    loss: type | None = ImageLossKeys
    augment: type | None = ImageAugmentKeys

    def check(self, config: Mapping[str, Any]) -> None:
        from longseq.tasks.training.classification import check_metrics

        require_train_set(config["data"])
        _check_model(config)
        _check_augmentation(config["recipe"].get("augment") or {})
        group, several = config["task"], bool(config["data"].get("multi_label"))
        if isinstance(group.get("metrics") or {}, Mapping):
            check_metrics(group["metric"], group.get("metrics") or {}, multi_label=several)
        if config["recipe"].get("name") == FINETUNE and not starts_trained(config):
            raise ValueError(
                f"recipe={FINETUNE} begins with trained weights: give init=FILE, or model=timm model.name=NAME "
                "model.pretrained=true"
            )

        if config.get("init") is not None and config["model"].get("pretrained"):
            raise ValueError(
                f"init={config['init']} and model.pretrained=true both give the first weights: leave one out"
            )

    def choose(self, config: Mapping[str, Any], info: DataInfo | None, parts: int) -> Choice:
        return choose_recipe(config, info, parts)
