"""Image models, built from a configuration."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import timm
import torch
from safetensors import SafetensorError
from timm.layers import PatchEmbed
from timm.models import is_model, load_state_dict, model_entrypoint
from torch import Tensor, nn

from longseq.backbones.image import ImageBackbone, checkpoint_filter_fn
from longseq.models import describe
from longseq.plugin_models import TARGET, make_plugin_model
from longseq.plugins import find_class
from longseq.tasks.image import weight_file
from longseq.tasks.image.info import DataInfo
from longseq.tasks.training.model import (
    TaskModel,
    copy_weights,
    mixer_options,
    note,
    note_new_head,
    refuse_difference,
)
from longseq.tasks.training.options import check_call, signature_options
from longseq.timm_models import (
    DECISION,
    constructor_defaults,
    model_name,
    stated_by,
    stated_crop_mode,
)

if TYPE_CHECKING:
    from longseq.tasks.training.checkpoint import Loaded

# The endings of files that hold weights alone.
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar")

# What was found of how the weights that a model took were trained. A run tells it.
_REMARKS: MutableMapping[nn.Module, str] = WeakKeyDictionary()


# The arguments of `ImageBackbone` that change what it computes of weights of the same shapes. Of another pooling a note
# tells, as models are often tuned with another one.
_FUNCTION = ("mixer", "mixer_options", "depth", "direction", "class_token", "no_embed_class", "norm", "norm_eps")


def _function_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model's arguments that change what it computes of its weights, as `find_difference` compares them."""
    read = {name: given[name] for name in _FUNCTION}
    both = given["direction"] in ("bidirectional", "cross")
    return {**read, "merge": given["merge"] if both else None, "mlp": None}


class ImageModel(TaskModel):
    """Builds the models that `timm.create_model` knows, including those of longseq, and those of a plug-in's class."""

    def build(self, config: Mapping[str, Any], info: DataInfo) -> nn.Module:
        """The model that `config.model` names.

        An option that is null there has the value of the recipe (`recipe.model`), or else the model's default.
        """
        is_own = TARGET in config["model"]
        model = _create_own(config, info) if is_own else self._create(config, info)
        if config["model"].get("pretrained") and not is_own:
            _compare_weights_of_timm(model, config["model"]["name"], info)
        state_data(model, info)
        return model

    def _create(self, config: Mapping[str, Any], info: DataInfo, **weights: Any) -> nn.Module:
        """The model; `weights` are the arguments of `timm.create_model` for pretrained weights."""
        options = {key: value for key, value in config["model"].items() if key not in ("name", "label")}
        name = config["model"]["name"]
        check_model_name(name)
        options = (config["recipe"].get("model") or {}) | {k: v for k, v in options.items() if v is not None}
        if name.startswith("longseq_"):
            options |= {"mixer": config["mixer"]["name"], "mixer_options": mixer_options(config)}
            options = _patches(info.side, overlapping=True) | options | {"img_size": info.side}
        else:
            options = _sizes(name, info.side) | options
        torch.manual_seed(config["seed"])
        try:
            return timm.create_model(
                name, num_classes=info.num_classes, in_chans=info.in_chans, **{**options, **weights}
            )
        except TypeError as error:
            raise ValueError(f"model {name} does not take these options: {error}") from error

    def remarks(self, model: nn.Module) -> list[str]:
        return [line for line in (_find_unread(model), _REMARKS.get(model)) if line is not None]

    def initialize(self, model: nn.Module, trained: nn.Module) -> None:
        """As `TaskModel.initialize`; position embeddings are interpolated to the grid of the new model, and the first
        convolution is fitted to its channels.

        Notes tell of both: a stride or a size that the command does not name may be the reason for another grid.
        ValueError also if two of our models compute different functions of the same weights.
        """
        state, fitted = weight_file.fit_channels(model, trained)
        if isinstance(model, ImageBackbone):
            here, theirs = (
                model.patch_embed.grid_size,
                getattr(getattr(trained, "patch_embed", None), "grid_size", None),
            )
            state = checkpoint_filter_fn(state, model, theirs)
            if theirs is not None and theirs != here:
                told = (f"{rows} x {columns}" for rows, columns in (theirs, here))
                note(model, "positions of {} patches are interpolated to {}".format(*told))
        copy_weights(model, state)
        if fitted:
            note(model, fitted)
        if type(model) is type(trained) is ImageBackbone:
            own, its = (describe(one)["model_args"] for one in (model, trained))
            refuse_difference(_function_of(own), _function_of(its))
            if own["global_pool"] != its["global_pool"]:
                pools = its["global_pool"], own["global_pool"]
                note(model, "the features of patches are pooled by {}, and now by {}".format(*pools))

    def start_from(self, model: nn.Module, loaded: Loaded, info: DataInfo) -> None:
        """As `TaskModel.start_from`; the head is new where the classes have other names or another order."""
        head: Any = getattr(model, "get_classifier", nn.Identity)()
        drawn = {name: value.clone() for name, value in head.state_dict().items()}
        super().start_from(model, loaded, info)
        _compare_preprocessing(model, f"init={loaded.path}", loaded.data, info)
        theirs = [str(name) for name in loaded.data.get("class_names") or []]
        if theirs != info.class_names:
            head.load_state_dict(drawn)
            note_new_head(model, info.class_names, theirs)

    def untrained(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if not config["model"].get("pretrained"):
            return config
        return {**config, "model": {**config["model"], "pretrained": False}}

    def is_weights(self, path: str) -> bool:
        return path.endswith(_WEIGHTS) and Path(path).is_file()

    def start_from_weights(self, model: nn.Module, config: Mapping[str, Any], info: DataInfo) -> None:
        """Load a file of timm's weights as timm does, which fits positions, patches and channels to the new model.

        The head is new where the file has another number of classes. Notes tell of it, and of what timm fits or leaves
        out. ValueError also for weights that are missing: of some models timm takes whatever fits.
        """
        name, path = config["model"]["name"], config["init"]
        if TARGET in config["model"]:
            raise ValueError(
                f"init={path} is for models of timm: load it in the constructor of {name}, or give a run's"
            )
        weight_file.refuse_file_of_a_folder(path)
        try:
            # With a head as in the file, timm refuses weights of another model; with another head it takes what fits.
            state = load_state_dict(path)
            count = weight_file.count_classes(name, state)
            source = {"num_classes": count} | weight_file.state_channels(model, name, info.in_chans, state)
            as_saved = replace(info, num_classes=count)

            def take(**weights: Any) -> nn.Module:
                return self._create(config, as_saved, pretrained=True, pretrained_cfg_overlay=source | weights)

            with weight_file.without_warnings():
                new = weight_file.find_new(name, take(state_dict=weight_file.mark(state)))
            copy_weights(model, take(file=path).state_dict())
        except (RuntimeError, KeyError, SafetensorError, UnpicklingError) as error:
            raise ValueError(f"init={path} holds no weights of a {name}: {weight_file.why_unfit(error)}") from error
        for line in weight_file.tell_fit(model, name, state, new):
            note(model, line)
        _compare_weights_of_timm(model, name, info)
        if count != info.num_classes:
            theirs_have = f"the weights are of {count}" if count else "the weights have no head"
            note(model, f"the head is new: there are {info.num_classes} classes, and {theirs_have}")

    def load_options(self, trained: DataInfo, changes: Mapping[str, Any]) -> dict[str, Any]:
        size = changes.get("img_size")
        height, width = trained.sides
        if size is None and height != width:
            raise ValueError(
                f"the model reads images of {height} x {width} px, and data.img_size is the side of a square: give "
                f"data.img_size={max(height, width)}, to which the model is fitted, or measure what `longseq predict` "
                "writes of these images"
            )
        return {} if size in (None, trained.img_size) else {"any_resolution": True}

    def check_reads(self, model: nn.Module, trained: DataInfo, found: DataInfo) -> None:
        if found.in_chans != trained.in_chans:
            raise ValueError(
                f"data.in_chans={found.in_chans}: the model was trained with images of {trained.in_chans} channel(s); "
                "leave it out"
            )
        if found.crop_mode != trained.crop_mode:
            raise ValueError(
                f"the model states crop_mode={trained.crop_mode}, and evaluate makes images by "
                f"crop_mode={found.crop_mode}: measure what `longseq predict` writes of them, or write "
                f'"crop_mode": "{found.crop_mode}" into the pretrained_cfg of its config.json'
            )
        size = found.side
        if size == trained.img_size:
            return
        try:
            with torch.inference_mode():
                model(torch.zeros(1, found.in_chans, size, size))
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"data.img_size={size} does not suit this {model_name(model)}: {reason}") from error


def own_arguments(config: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the plug-in's class that `model._target_` names: the other keys of `model`, and of `told` those
    that its constructor takes. ValueError, in one line, for what it does not take.
    """
    node = config["model"]
    cls = find_class(node[TARGET], nn.Module, f"model.{TARGET}")
    taken = signature_options(cls)
    options = {key: value for key, value in node.items() if key not in (TARGET, "name", "label")}
    of_recipe = {key: value for key, value in (config["recipe"].get("model") or {}).items() if value is not None}
    if unread := [key for key in of_recipe if key not in taken and key not in options]:
        raise ValueError(
            f"the recipe sets {unread[0]}, which {cls.__name__} does not have: add recipe.model.{unread[0]}=null"
        )
    return check_call(cls, {key: value for key, value in told.items() if key in taken} | of_recipe | options, "model")


def _create_own(config: Mapping[str, Any], info: DataInfo) -> nn.Module:
    """The model of a plug-in's class. The classes, channels and size of the data are arguments if it takes them."""
    told = {"num_classes": info.num_classes, "in_chans": info.in_chans, "img_size": info.img_size}
    arguments = own_arguments(config, told)
    torch.manual_seed(config["seed"])
    model = make_plugin_model(config["model"][TARGET], arguments)
    _check_logits(model, info)
    return model


def _check_logits(model: nn.Module, info: DataInfo) -> None:
    """ValueError, in one line, for a model that does not map images to a logit for each class."""
    name, images = type(model).__name__, torch.zeros(2, info.in_chans, info.side, info.side)
    needed = f"images {list(images.shape)} must become logits {[len(images), info.num_classes]}"
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{name} has no parameters, and nothing to train")
    was_training = model.training
    try:
        with torch.no_grad():
            logits = model.eval()(images)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name}: {needed}, and its forward fails on them: {reason}") from error
    finally:
        model.train(was_training)
    if not isinstance(logits, Tensor) or logits.shape != (len(images), info.num_classes):
        given = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(f"{name}: {needed}, and it gives {given}: its constructor may take num_classes")


def _find_unread(model: nn.Module) -> str | None:
    """A line about pixels between patches, or at the lower and the right border, that fill none; None if patches cover
    the images.

    As timm's own models, ours leave them out without a word.
    """
    embed: Any = getattr(model, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.img_size is None:
        return None
    size, patch = embed.img_size[0], embed.patch_size  # images of training are squares
    stride = getattr(embed, "stride", patch)
    if any(step > length for length, step in zip(patch, stride, strict=True)):
        return (
            f"model.stride={_spell(stride)} is larger than the patches of {_spell(patch)} px, and the pixels between "
            "these are not read; leave it out, or give a smaller one"
        )
    if embed.dynamic_img_pad:
        return None
    sides = tuple(zip(patch, stride, strict=True))
    rows, columns = ((size - length) % step for length, step in sides)
    if rows == columns == 0:
        return None
    fitting = [
        next((one for one in sizes if all((one - length) % step == 0 for length, step in sides)), None)
        for sizes in (range(size - 1, max(patch) - 1, -1), range(size + 1, size + 1 + math.lcm(*stride)))
    ]
    others = " and ".join(str(one) for one in fitting if one is not None)
    cut = f"patches of {_spell(patch)} px" + (f" at every {_spell(stride)} px" if stride != patch else "")
    remedy = [f"sizes that fit are {others}"] * bool(others)
    remedy += ["model.dynamic_img_pad=true completes them by zeros"] * isinstance(model, ImageBackbone)
    told = f"data.img_size={size}: {cut} leave the last {rows} row(s) and {columns} column(s) of pixels unread"
    return "; ".join([told, *remedy])


def _spell(pair: tuple[int, int]) -> str:
    height, width = pair
    return str(height) if height == width else f"{height} x {width}"


def state_data(model: nn.Module, info: DataInfo) -> None:
    """Write the preprocessing and the class names to timm's attributes of a model, which are saved with the model."""
    stated = {
        "num_classes": info.num_classes,
        "label_names": tuple(info.class_names),
        "input_size": (info.in_chans, *info.sides),
        "mean": tuple(info.mean),
        "std": tuple(info.std),
        "interpolation": info.interpolation,
        "crop_pct": info.crop_pct,
        "crop_mode": info.crop_mode,
    }
    # what the pretrained weights of a timm model stated
    former = {key: value for key, value in stated_by(model).items() if not key.startswith(("test_", "label_"))}
    described: Any = model
    described.pretrained_cfg = described.default_cfg = {**former, **stated}
    state_decision(model, multi_label=info.multi_label, thresholds=info.thresholds)


def state_decision(model: nn.Module, *, multi_label: bool, thresholds: list[float] | None) -> None:
    """Write how probabilities become decisions to a model, which is saved with it.

    By default nothing is written, and what an earlier training wrote is removed.
    """
    stated = {"multi_label": multi_label, "thresholds": thresholds}
    described: Any = model
    if multi_label or thresholds is not None:
        setattr(described, DECISION, stated)
    elif isinstance(getattr(described, DECISION, None), Mapping):  # a model may have a layer of this name
        delattr(described, DECISION)


def _compare_weights_of_timm(model: nn.Module, name: str, info: DataInfo) -> None:
    cfg: Any = timm.get_pretrained_cfg(name)
    if cfg is not None:
        stated = {"mean": cfg.mean, "std": cfg.std, "crop_mode": stated_crop_mode({"crop_mode": cfg.crop_mode})}
        _compare_preprocessing(model, f"model.name={name}", stated, info)


def _compare_preprocessing(model: nn.Module, origin: str, theirs: Mapping[str, Any], info: DataInfo) -> None:
    """Remark, in one line, if trained weights saw images that were normalised or cut otherwise."""
    stated = {key: [float(value) for value in theirs.get(key) or ()] for key in ("mean", "std")}
    ours = {"mean": info.mean, "std": info.std}
    other = [key for key, values in stated.items() if len(values) == info.in_chans and values != ours[key]]
    if other:
        told, own = (" ".join(f"data.{key}={_digits(one[key])}" for key in other) for one in (stated, ours))
        _REMARKS[model] = f"{origin}: its weights were trained with {told}, and this run has {own}"
    if (mode := str(theirs.get("crop_mode", "center"))) != info.crop_mode:
        before = f"{_REMARKS[model]}; they were" if model in _REMARKS else f"{origin}: its weights were"
        _REMARKS[model] = f"{before} measured with crop_mode={mode}, and this run measures with {info.crop_mode}"


def _digits(values: Sequence[float]) -> str:
    """Numbers as a command takes them."""
    return f"[{','.join(f'{value:.6g}' for value in values)}]"


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
