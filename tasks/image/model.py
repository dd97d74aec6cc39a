"""Image models, built from a configuration."""

from __future__ import annotations

import inspect
import logging
import math
import typing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import timm
import torch
from safetensors import SafetensorError
from timm.models import load_state_dict, model_entrypoint
from torch import Tensor, nn

from longseq.backbones.image import ImageBackbone, checkpoint_filter_fn
from longseq.models import PLUGIN, TIMM, describe
from longseq.plugin_models import TARGET, make_plugin_model
from longseq.plugins import find_class
from longseq.tasks.data.labels import name_some
from longseq.tasks.image.config import DataInfo
from longseq.tasks.training.model import TaskModel, copy_weights, mixer_options, refuse_difference
from longseq.timm_models import DECISION, constructor_defaults, stated_by

if TYPE_CHECKING:
    from longseq.tasks.training.checkpoint import Loaded

_log = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar")  # the endings of files that hold only weights

# Arguments of models that the data or other groups of a configuration determine.
_OF_DATA = ("img_size", "in_chans", "num_classes", "mixer", "mixer_options")

# Arguments of `ImageBackbone` that change the function of weights with the same shapes. The pooling may change.
_FUNCTION = ("mixer", "mixer_options", "depth", "direction", "class_token", "no_embed_class", "norm", "norm_eps")


class ImageModel(TaskModel):
    """Builds models of `timm.create_model`, including longseq's, and models of a plug-in's class."""

    def like(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        kind, stated = saved.get("kind", TIMM), saved.get("model_args", {})
        keys = {name: value for name, value in stated.items() if name not in _OF_DATA}
        if kind == PLUGIN:
            return {"defaults": ["own", "_self_"], **keys}
        if kind not in ("image", TIMM):
            return {}
        kept = {name: value for name, value in keys.items() if "drop" not in name}
        return {"defaults": ["vit" if kind == "image" else "timm", "_self_"], **kept, "name": saved["architecture"]}

    def build(self, config: Mapping[str, Any], info: DataInfo) -> nn.Module:
        """The model that `config.model` names; a null option has the value of `recipe.model`, or else the default."""
        model = _create_own(config, info) if TARGET in config["model"] else _create(config, info)
        state_data(model, info)
        return model

    def initialize(self, model: nn.Module, trained: nn.Module) -> None:
        """As `TaskModel.initialize`, with position embeddings interpolated to the new grid of patches.

        ValueError also if models of longseq differ in their function.
        """
        state = trained.state_dict()
        if isinstance(model, ImageBackbone):
            grid = getattr(getattr(trained, "patch_embed", None), "grid_size", None)
            state = checkpoint_filter_fn(state, model, grid)
        copy_weights(model, state)
        if type(model) is type(trained) is ImageBackbone:
            own, its = (describe(one)["model_args"] for one in (model, trained))
            refuse_difference(_function_of(own), _function_of(its))

    def start_from(self, model: nn.Module, loaded: Loaded, info: DataInfo) -> None:
        """As `TaskModel.start_from`; the head is new if the classes have other names or another order."""
        head: Any = getattr(model, "get_classifier", nn.Identity)()
        drawn = {name: value.clone() for name, value in head.state_dict().items()}
        super().start_from(model, loaded, info)
        theirs = [str(name) for name in loaded.data.get("class_names") or []]
        if theirs != info.class_names:
            head.load_state_dict(drawn)
            others = f"and the weights have {name_some(theirs)}" if theirs else "and the weights name none"
            _log.warning("the head is new: the classes are %s, %s", name_some(info.class_names), others)

    def is_weights(self, path: str) -> bool:
        return path.endswith(_WEIGHTS) and Path(path).is_file()

    def start(self, model: nn.Module, config: Mapping[str, Any], info: DataInfo) -> None:
        if self.is_weights(config["init"]):
            self._start_from_weights(model, config, info)
        else:
            super().start(model, config, info)

    def _start_from_weights(self, model: nn.Module, config: Mapping[str, Any], info: DataInfo) -> None:
        """Load a file of weights with timm, which fits positions, patches and channels to the new model.

        The head is new for another number of classes. ValueError also for missing weights, which timm may ignore.
        """
        name, path = config["model"]["name"], config["init"]
        if TARGET in config["model"]:
            raise ValueError(f"init={path}: only models of timm read files of weights")
        cfg: Any = timm.get_pretrained_cfg(name)
        heads = getattr(cfg, "classifier", None)
        head = str(heads[0] if isinstance(heads, list | tuple) else heads)
        try:
            state = load_state_dict(path)
            # timm checks the weights only if the model has a head as in the file.
            weight = state.get(f"{head}.weight")
            count = 0 if weight is None else len(weight)
            as_saved = replace(info, num_classes=count)

            def take(**weights: Any) -> nn.Module:
                overlay = {"num_classes": count, **weights}
                return _create(config, as_saved, pretrained=True, pretrained_cfg_overlay=overlay)

            # NaN weights show which parameters timm loads.
            marks = {key: torch.full_like(value, math.nan) for key, value in state.items() if _is_float(value)}
            replaced = (f"{head.split('.')[0]}.", "fc_norm.")  # the head, and the norm before it
            for key, value in take(state_dict={**state, **marks}).state_dict().items():
                missing = _is_float(value) and value.numel() and not value.isnan().any()
                if missing and not key.startswith(replaced):
                    raise RuntimeError(f"{key} is missing")
            copy_weights(model, take(file=path).state_dict())
        except (RuntimeError, KeyError, SafetensorError, UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"init={path} holds no weights of a {name}: {reason}") from error
        if count != info.num_classes:
            _log.warning("the head is new: there are %d classes, and the weights are of %d", info.num_classes, count)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _function_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model that change the function of its weights."""
    both = given["direction"] in ("bidirectional", "cross")
    return {**{name: given[name] for name in _FUNCTION}, "merge": given["merge"] if both else None, "mlp": None}


def _create(config: Mapping[str, Any], info: DataInfo, **weights: Any) -> nn.Module:
    """A model of timm; `weights` are the arguments of `timm.create_model` for pretrained weights."""
    options = {key: value for key, value in config["model"].items() if key not in ("name", "label")}
    name = config["model"]["name"]
    options = (config["recipe"].get("model") or {}) | {k: v for k, v in options.items() if v is not None}
    if name.startswith("longseq_"):
        options |= {"mixer": config["mixer"]["name"], "mixer_options": mixer_options(config)}
        options = _patches(info.side, overlapping=True) | options | {"img_size": info.side}
    else:
        options = _sizes(name, info.side) | options
    torch.manual_seed(config["seed"])
    return timm.create_model(name, num_classes=info.num_classes, in_chans=info.in_chans, **{**options, **weights})


def _create_own(config: Mapping[str, Any], info: DataInfo) -> nn.Module:
    """A model of the plug-in's class that `model._target_` names.

    The constructor gets the keys of `model` and the recipe, and `num_classes`, `in_chans`, `img_size` if it takes them.
    """
    node = config["model"]
    taken = inspect.signature(find_class(node[TARGET], nn.Module, f"model.{TARGET}")).parameters
    options = {key: value for key, value in node.items() if key not in (TARGET, "name", "label")}
    of_recipe = {key: value for key, value in (config["recipe"].get("model") or {}).items() if value is not None}
    given = {"num_classes": info.num_classes, "in_chans": info.in_chans, "img_size": info.img_size}
    arguments = {key: value for key, value in given.items() if key in taken} | of_recipe | options
    torch.manual_seed(config["seed"])
    return make_plugin_model(node[TARGET], arguments)


def state_data(model: nn.Module, info: DataInfo) -> None:
    """Write the preprocessing and the class names to timm's attributes of a model, which its files keep."""
    stated = {
        **{name: getattr(info, name) for name in ("num_classes", "interpolation", "crop_pct", "crop_mode")},
        **{name: tuple(getattr(info, name)) for name in ("mean", "std")},
        "label_names": tuple(info.class_names),
        "input_size": (info.in_chans, *info.sides),
    }
    # of the pretrained weights
    former = {key: value for key, value in stated_by(model).items() if not key.startswith(("test_", "label_"))}
    described: Any = model
    described.pretrained_cfg = described.default_cfg = {**former, **stated}
    state_decision(model, multi_label=info.multi_label, thresholds=info.thresholds)


def state_decision(model: nn.Module, *, multi_label: bool, thresholds: list[float] | None) -> None:
    """Write to a model how probabilities become decisions; it is saved with the model.

    If they are the default ones, nothing is written, and the entry of an earlier training is removed.
    """
    described: Any = model
    if multi_label or thresholds is not None:
        setattr(described, DECISION, {"multi_label": multi_label, "thresholds": thresholds})
    elif isinstance(getattr(described, DECISION, None), Mapping):  # a model may have a layer of this name
        delattr(described, DECISION)


def _sizes(name: str, img_size: int) -> dict[str, int]:
    """Arguments that fit a timm model of fixed size to `img_size`; its patches change only below 128 pixels."""
    taken = constructor_defaults(typing.get_type_hints(model_entrypoint(name)).get("return"))
    if not timm.get_pretrained_cfg(name).fixed_input_size or "img_size" not in taken:  # type: ignore[union-attr]
        return {}
    # Models with one grid of patches, such as ViT; pyramids such as Swin fit small images themselves.
    small = img_size < 128 and taken.get("patch_size") == 16
    return (_patches(img_size, overlapping=False) if small else {}) | {"img_size": img_size}


def _patches(img_size: int, *, overlapping: bool) -> dict[str, int]:
    """Default patches: 16 pixels from 128 on, else 4; for 8 pixels (digits), 6 with overlap, or 2."""
    if img_size >= 128:
        return {"patch_size": 16}
    if img_size > 8:
        return {"patch_size": 4}
    return {"patch_size": 6, "stride": 1} if overlapping else {"patch_size": 2}
