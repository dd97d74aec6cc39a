"""Image models in timm's form of config.json, and models that timm builds itself."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import timm
from timm.models import filter_pretrained_cfg, get_model_args, get_model_input_config
from torch import nn

# Options of timm's models that name files of weights, which the model's own file replaces.
WEIGHT_OPTIONS = ("pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay")
WEIGHT_SOURCES = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict")

# The attribute of a model, and the key of its config.json, for how probabilities become decisions: `multi_label` and
# `thresholds`, as in `longseq.tasks.image.config.DataInfo`.
DECISION = "decision"

# How timm cuts an image to the model's size where it does not crop the centre.
OTHER_CROPS = ("squash", "border")

# Options that timm records of a call but that are not needed to build the model again.
UNSAVED_OPTIONS = (*WEIGHT_OPTIONS, "pretrained_model_args", "scriptable", "exportable", "no_jit")


def is_timm_model(model: nn.Module) -> bool:
    """Whether `timm.create_model` made the model, and can make it again."""
    arguments: Any = getattr(model, "_model_args", None)
    return bool(stated_by(model)) and arguments is not None and "features_only" not in arguments


def constructor_defaults(cls: type | None) -> dict[str, Any]:
    """The options of a model's constructor, and of the base classes to which it passes options on."""
    defaults: dict[str, Any] = {}
    for base in getattr(cls, "__mro__", ()):
        parameters = inspect.signature(base.__init__).parameters
        for key, parameter in parameters.items():
            if key != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                defaults.setdefault(key, parameter.default)
        if base is nn.Module or "kwargs" not in parameters:
            break
    return defaults


def describe_timm_model(model: nn.Module) -> dict[str, Any]:
    """The keys of config.json for a model of timm: the options of `timm.create_model`, with its current sizes."""
    recorded: Any = model._model_args
    options = {**recorded, **get_model_args(model)}  # timm's function leaves out options that matter in training only
    arguments = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name not in UNSAVED_OPTIONS
    }
    return {**timm_layout(model, stated_by(model)), "model_args": arguments}


def rebuild_timm_model(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Build the model that a config.json names, without weights; `changes` override its `model_args`."""
    arguments = {**config.get("model_args", {}), **changes}
    options = {key: value for key, value in arguments.items() if key not in UNSAVED_OPTIONS}
    model: Any = timm.create_model(config["architecture"], pretrained_cfg=read_stated(config), **options)
    if config.get(DECISION):
        setattr(model, DECISION, dict(config[DECISION]))
    return model


def read_stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """timm's `pretrained_cfg` in a config.json: preprocessing and class names, without sources of weights."""
    cfg = {key: value for key, value in config.get("pretrained_cfg", {}).items() if key not in WEIGHT_SOURCES}
    own = ("architecture", "num_classes", "label_names", "label_descriptions")
    cfg |= {key: config[key] for key in own if config.get(key) is not None}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in cfg.items()}


def stated_by(model: nn.Module) -> Mapping[str, Any]:
    """The model's `pretrained_cfg`: preprocessing and class names; empty if it has none."""
    cfg: Any = getattr(model, "pretrained_cfg", None)
    return cfg or {}


def timm_layout(model: nn.Module, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that timm reads in a config.json, except `model_args`; `stated` is the model's `pretrained_cfg`."""
    described: Any = model
    cfg = filter_pretrained_cfg(dict(stated), remove_source=True, remove_null=True)
    cfg |= get_model_input_config(model)
    cfg = {key: list(value) if isinstance(value, tuple) else value for key, value in cfg.items()}
    # The weights have the form of the model's own state dict, wherever they came from.
    cfg |= {"num_classes": described.num_classes, "custom_load": False}
    names = cfg.pop("label_names", None)
    labels = cfg.pop("label_descriptions", None)
    fits = names is not None and len(names) == described.num_classes
    return {
        "architecture": cfg.pop("architecture"),
        "num_classes": described.num_classes,
        "num_features": described.num_features,
        **({"global_pool": described.global_pool} if isinstance(getattr(model, "global_pool", None), str) else {}),
        **({"label_names": names} if fits else {}),
        **({"label_descriptions": labels} if fits and labels else {}),
        "pretrained_cfg": {key: value for key, value in cfg.items() if key not in WEIGHT_SOURCES},
        **({DECISION: decision} if (decision := stated_decision(model)) else {}),
    }


def stated_decision(model: nn.Module) -> dict[str, Any]:
    """The model's `DECISION`; thresholds for another number of classes are dropped."""
    decision: dict[str, Any] = dict(getattr(model, DECISION, None) or {})
    thresholds, classes = decision.get("thresholds"), getattr(model, "num_classes", None)
    if thresholds is None or classes is None:
        return decision
    if decision["multi_label"]:
        return decision if len(thresholds) == classes else {**decision, "thresholds": None}
    return decision if classes == 2 else {}


def model_name(model: nn.Module) -> str:
    """The name under which timm builds the model, or else the name of its class."""
    return stated_by(model).get("architecture") or type(model).__name__


def stated_data(model: nn.Module) -> dict[str, Any]:
    """The preprocessing and class names in the model's `pretrained_cfg`, under the keys of a checkpoint's `data`."""
    stated = stated_by(model)
    if "input_size" not in stated:
        return {}
    channels, height, width = get_model_input_config(model)["input_size"]
    names = stated.get("label_names") or ()
    return {
        **({"class_names": list(names), "num_classes": len(names)} if len(names) == stated.get("num_classes") else {}),
        **stated_decision(model),
        "img_size": height if height == width else [height, width],
        "in_chans": channels,
        "mean": _of_channels(stated["mean"], channels),
        "std": _of_channels(stated["std"], channels),
        "interpolation": stated.get("interpolation", "bicubic"),
        "crop_pct": stated.get("crop_pct", 1.0),
        "crop_mode": mode if (mode := stated.get("crop_mode")) in OTHER_CROPS else "center",  # like timm
    }


def _of_channels(values: Sequence[float], channels: int) -> list[float]:
    """A value for each channel; a model that reads grey gets the mean of timm's values for RGB."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


def takes_any_resolution(model: nn.Module) -> bool:
    """Whether the model accepts any image size, by its own switch or by timm's `fixed_input_size`."""
    if hasattr(model, "dynamic_img_size"):
        return bool(model.dynamic_img_size)
    stated = stated_by(model)
    return "input_size" in stated and not stated.get("fixed_input_size", False)
