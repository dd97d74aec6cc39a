"""What an image model of timm states about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["model_name", "stated_data", "takes_any_resolution"]


def _stated(model: nn.Module) -> Mapping[str, Any]:
    stated: Any = getattr(model, "pretrained_cfg", None)
    return stated or {}


def model_name(model: nn.Module) -> str:
    """The name under which timm builds the model; for other models the name of their class."""
    return _stated(model).get("architecture") or type(model).__name__


def stated_data(model: nn.Module) -> dict[str, Any]:
    """The preprocessing that the model states, by the keys of a checkpoint's `data`; empty where it states none."""
    stated = _stated(model)
    if "input_size" not in stated:
        return {}
    channels, height, width = stated["input_size"]
    return {
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
