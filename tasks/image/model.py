"""Image models, built from a configuration."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import timm
import torch
from timm.models import is_model, model_entrypoint
from torch import nn

from longseq.backbones.image import ImageBackbone, checkpoint_filter_fn
from longseq.tasks.image.info import DataInfo
from longseq.tasks.training.model import TaskModel, copy_weights, mixer_options, without_weights
from longseq.timm_models import DECISION, constructor_defaults, model_name, stated_by


class ImageModel(TaskModel):
    """Builds the models that `timm.create_model` knows, including those of longseq."""

    def build(self, config: Mapping[str, Any], info: DataInfo) -> nn.Module:
        """The model that `config.model` names.

        An option that is null there has the value of the recipe (`recipe.model`), or else the model's default.
        """
        options = {key: value for key, value in config["model"].items() if key not in ("name", "label")}
        name = config["model"]["name"]
        check_model_name(name)
        options = (config["recipe"].get("model") or {}) | {k: v for k, v in options.items() if v is not None}
        if name.startswith("longseq_"):
            options |= {"mixer": config["mixer"]["name"], "mixer_options": mixer_options(config)}
            options = _patches(info.img_size, overlapping=True) | options | {"img_size": info.img_size}
        else:
            options = _sizes(name, info.img_size) | options
        torch.manual_seed(config["seed"])
        try:
            model = timm.create_model(name, num_classes=info.num_classes, in_chans=info.in_chans, **options)
        except TypeError as error:
            raise ValueError(f"model {name} does not take these options: {error}") from error
        state_data(model, info)
        state_decision(model, multi_label=info.multi_label, thresholds=info.thresholds)
        return model

    def check(self, config: Mapping[str, Any]) -> None:
        # Models of timm may load weights when they are made, and do not all go without memory.
        if config["model"]["name"].startswith("longseq_"):
            data = config["data"]
            info = DataInfo(
                class_names=["0", "1"],
                num_classes=2,
                img_size=data["img_size"],
                in_chans=data.get("in_chans", 3),
                mean=[0.5],
                std=[0.5],
                interpolation="bicubic",
                crop_pct=1.0,
            )
            with without_weights():
                self.build(config, info)

    def initialize(self, model: nn.Module, trained: nn.Module) -> None:
        """As `TaskModel.initialize`; position embeddings are interpolated to the grid of the new model."""
        state = trained.state_dict()
        copy_weights(model, checkpoint_filter_fn(state, model) if isinstance(model, ImageBackbone) else state)

    def load_options(self, trained: DataInfo, changes: Mapping[str, Any]) -> dict[str, Any]:
        size = changes.get("img_size")
        return {} if size in (None, trained.img_size) else {"any_resolution": True}

    def check_reads(self, model: nn.Module, trained: DataInfo, found: DataInfo) -> None:
        size = found.img_size
        if size == trained.img_size:
            return
        try:
            with torch.inference_mode():
                model(torch.zeros(1, found.in_chans, size, size))
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"data.img_size={size} does not suit this {model_name(model)}: {reason}") from error


def state_data(model: nn.Module, info: DataInfo) -> None:
    """Write the preprocessing and the class names to timm's attributes of a model, which are saved with the model."""
    stated = {
        "num_classes": info.num_classes,
        "label_names": tuple(info.class_names),
        "input_size": (info.in_chans, info.img_size, info.img_size),
        "mean": tuple(info.mean),
        "std": tuple(info.std),
        "interpolation": info.interpolation,
        "crop_pct": info.crop_pct,
    }
    # what the pretrained weights of a timm model stated
    former = {key: value for key, value in stated_by(model).items() if not key.startswith(("test_", "label_"))}
    described: Any = model
    described.pretrained_cfg = described.default_cfg = {**former, **stated}


def state_decision(model: nn.Module, *, multi_label: bool, thresholds: list[float] | None) -> None:
    """Write how probabilities become decisions to a model, which is saved with it; by default nothing is written."""
    stated = {"multi_label": multi_label, "thresholds": thresholds}
    if multi_label or thresholds is not None:
        described: Any = model
        setattr(described, DECISION, stated)


def _sizes(name: str, img_size: int) -> dict[str, int]:
    """The arguments that fit a timm model of fixed size to `img_size`; from 128 pixels on, its patches stay."""
    taken = model_options(name)
    if not timm.get_pretrained_cfg(name).fixed_input_size or "img_size" not in taken:  # type: ignore[union-attr]
        return {}
    # ViT and similar models have one patch grid, of 16 pixels by default. Pyramids such as Swin fit small images
    # themselves.
    small = img_size < 128 and taken.get("patch_size") == 16
    return (_patches(img_size, overlapping=False) if small else {}) | {"img_size": img_size}


def check_model_name(name: str) -> None:
    """Raise ValueError for a name that timm does not know; the message suggests similar names."""
    if not is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:3]
        raise ValueError(f"unknown model.name={name!r}: `timm.list_models()` lists them{_such_as(near)}")


def model_options(name: str) -> dict[str, Any]:
    """The options of a timm model's constructor, with their defaults."""
    return constructor_defaults(typing.get_type_hints(model_entrypoint(name)).get("return"))


def _patches(img_size: int, *, overlapping: bool) -> dict[str, int]:
    """The default patches: of 16 pixels from 128 on, else of 4; for 8 pixels (digits), 9 that overlap, or of 2."""
    if img_size >= 128:
        return {"patch_size": 16}
    if img_size > 8:
        return {"patch_size": 4}
    return {"patch_size": 6, "stride": 1} if overlapping else {"patch_size": 2}


def _such_as(names: list[str]) -> str:
    return f", such as {', '.join(names)}" if names else ""
