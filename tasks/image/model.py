"""What an image model of timm states about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.models import get_model_input_config
from torch import nn

from longseq.tasks.image.info import DataInfo

__all__ = ["model_name", "state_data", "stated_data", "takes_any_resolution"]


def _stated(model: nn.Module) -> Mapping[str, Any]:
    stated: Any = getattr(model, "pretrained_cfg", None)
    return stated or {}


def model_name(model: nn.Module) -> str:
    """The name under which timm builds the model; for other models the name of their class."""
    return _stated(model).get("architecture") or type(model).__name__


def state_data(model: nn.Module, info: DataInfo) -> None:
    """Write the preprocessing and the class names where timm's models have them: they are saved with the model."""
    stated = {
        "num_classes": info.num_classes,
        "label_names": tuple(info.class_names),
        "input_size": (info.in_chans, info.img_size, info.img_size),
        "mean": tuple(info.mean),
        "std": tuple(info.std),
        "interpolation": info.interpolation,
        "crop_pct": info.crop_pct,
    }
    # Those of the weights that a model of timm had come with.
    former = {key: value for key, value in _stated(model).items() if not key.startswith(("test_", "label_"))}
    described: Any = model
    described.pretrained_cfg = described.default_cfg = {**former, **stated}


def stated_data(model: nn.Module) -> dict[str, Any]:
    """The preprocessing, and class names, that the model states, by the keys of a checkpoint's `data`."""
    stated = _stated(model)
    if "input_size" not in stated:
        return {}
    channels, height, width = get_model_input_config(model)["input_size"]
    names = stated.get("label_names") or ()
    return {
        **({"class_names": list(names), "num_classes": len(names)} if len(names) == stated["num_classes"] else {}),
        "img_size": height if height == width else [height, width],
        "in_chans": channels,
        "mean": list(stated["mean"]),
        "std": list(stated["std"]),
        "interpolation": stated.get("interpolation", "bicubic"),
        "crop_pct": stated.get("crop_pct", 1.0),
    }


def takes_any_resolution(model: nn.Module) -> bool:
    """Whether the model says that its image size is free: by a switch of its own, or by timm's word on its kind."""
    if hasattr(model, "dynamic_img_size"):
        return bool(model.dynamic_img_size)
    stated = _stated(model)
    return "input_size" in stated and not stated.get("fixed_input_size", False)
