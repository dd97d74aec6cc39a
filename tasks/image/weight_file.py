"""Files of timm's weights: how a model of timm takes one, and what of it timm fits or leaves out without a word."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import adapt_input_conv, get_model_input_config
from torch import Tensor, nn

from longseq.hub import CONFIG_FILE
from longseq.timm_models import stated_data

# Weights between the blocks and the head, of which some files have none: the norm of pooled features.
_AFTER_BLOCKS = ("fc_norm.",)

# The tokens of a Vision Transformer that are no patches.
_PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")


def count_classes(name: str, state: Mapping[str, Any]) -> int:
    """The classes of a file of weights, 0 where it has no head for this model."""
    weight = state.get(f"{_head_of(name)}.weight")
    return 0 if weight is None else len(weight)


def state_channels(model: nn.Module, name: str, in_chans: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """The key that tells timm for how many channels a file of weights is, which it takes to be three.

    Empty where the first convolution does not tell: some models fold pixels into its channels.
    """
    cfg: Any = timm.get_pretrained_cfg(name)
    first = cfg.first_conv if cfg is not None else None
    weight = state.get(f"{first}.weight")
    layer = dict(model.named_modules()).get(first) if isinstance(first, str) else None
    if weight is None or weight.ndim != 4 or not isinstance(layer, nn.Conv2d) or layer.in_channels != in_chans:
        return {}
    return {"input_size": (weight.shape[1] * layer.groups, *cfg.input_size[1:])}


def fit_channels(model: nn.Module, trained: nn.Module) -> tuple[dict[str, Any], str | None]:
    """The weights of `trained` with first convolutions for the channels of `model`, as timm fits them, and a line that
    tells it; None where nothing is fitted.

    ValueError, in one line, for other channels to which timm cannot fit the weights.
    """
    state = trained.state_dict()
    here, there = (stated_data(one).get("in_chans") for one in (model, trained))
    if here == there or here is None or there is None:
        return state, None
    named: Any = get_model_input_config(model).get("first_conv") or ()
    keys = [f"{name}.weight" for name in ([named] if isinstance(named, str) else named)]
    own = model.state_dict()
    fitted = []
    for key in keys:
        if key not in state or key not in own or own[key].ndim != 4 or own[key].shape[1] == state[key].shape[1]:
            continue
        try:
            weight = adapt_input_conv(here, state[key], base_chans=there)
        except (NotImplementedError, AssertionError):
            continue
        if weight.shape[1] == own[key].shape[1]:
            state[key] = weight
            fitted.append(key)
    # only the classes of a head change the first dimension alone
    if not fitted and any(key in state and state[key].shape[1:] != value.shape[1:] for key, value in own.items()):
        raise ValueError(
            f"init: the model of the file reads images of {there} channel(s), and its first layer cannot be fitted to "
            f"{here}: give data.in_chans={there}"
        )
    if not fitted:
        return state, None
    return state, f"fitted from {there} to {here} channel(s), as timm does it: {_first(fitted)}"


def mark(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a file, all of them NaN: a model that takes them shows which of its own it took from the file."""
    return {
        name: torch.full_like(value, math.nan) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in state.items()
    }


@contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, timm does not list the weights of a file that a model has no place for; it does so at the load itself."""
    log = logging.getLogger("timm.models._builder")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def find_new(name: str, marked: nn.Module) -> list[str]:
    """The weights that a file has not, by what a model took of its `mark`: of some models timm takes whatever fits.

    RuntimeError, as of `load_state_dict`, if any is missing that does not stand between the blocks and the head.
    """
    new = [
        key
        for key, value in marked.state_dict().items()
        if value.is_floating_point() and value.numel() and not bool(value.isnan().any())
    ]
    behind = (f"{_head_of(name).split('.')[0]}.", *_AFTER_BLOCKS)
    if inner := [key for key in new if not key.startswith(behind)]:
        raise RuntimeError(f"{len(inner)} missing ({_first(inner)})")
    return new


def tell_fit(model: nn.Module, name: str, state: Mapping[str, Any], new: list[str]) -> list[str]:
    """What a user may not expect of the weights that `model` took from a file, in a line each.

    `new` are those behind the blocks that the file has not. Of the head, which depends on the classes, nothing is told.
    """
    own, lines = model.state_dict(), []
    head = f"{_head_of(name)}."
    fitted = [
        key
        for key, value in own.items()
        if isinstance(state.get(key), Tensor) and state[key].numel() != value.numel() and not key.startswith(head)
    ]
    if "pos_embed" in fitted and (grid := _tell_grid(model, state)) is not None:
        lines += [grid] if grid else []
        fitted.remove("pos_embed")
    if fitted:
        lines.append(f"fitted to other shapes, as timm does it: {_first(fitted)}")
    if new:
        lines.append(f"new, as the file has none: {_first(new)}")
    if not any(key.startswith("attn_pool.") for key in own) and any(key.startswith("attn_pool.") for key in state):
        pooling = getattr(model, "global_pool", None)
        lines.append(f"the features of patches are pooled by map, and now by {pooling or 'none'}")
    return lines


def _tell_grid(model: nn.Module, state: Mapping[str, Any]) -> str | None:
    """A line about positions of another grid of patches, empty for one of as many cells; None without a grid."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    table = state["pos_embed"]
    if grid is None or table.ndim != 3:
        return None
    prefix = sum(state[key].shape[1] for key in _PREFIX_TOKENS if key in state)
    cells = [table.shape[1] - prefix, table.shape[1]]
    if math.prod(grid) in cells:
        return ""
    side = next((math.isqrt(count) for count in cells if count > 0 and math.isqrt(count) ** 2 == count), None)
    told = str(cells[0]) if side is None else f"{side} x {side}"
    return f"positions of {told} patches are interpolated to {grid[0]} x {grid[1]}"


def refuse_file_of_a_folder(path: str) -> None:
    """ValueError for the file of weights in a folder of `save_pretrained`, whose config.json says what they compute."""
    folder = Path(path).parent
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a file beside it that is none of ours
        return
    if isinstance(config, dict) and config.get("library_name") == "longseq":
        raise ValueError(
            f"init={path} holds the weights alone of a saved model, whose {CONFIG_FILE} says what they compute and for "
            f"which classes: give its folder, init={folder}"
        )


def why_unfit(error: Exception) -> str:
    """What an error of `load_state_dict` says, with the numbers of its names and the first of them; of others its
    first words.
    """
    text = " ".join(str(error).split())
    found = {}
    for what, key in (("missing", "Missing key"), ("unexpected", "Unexpected key")):
        listed = re.search(rf'{key}\(s\) in state_dict: ((?:"[^"]+",? ?)+)', text)
        found[what] = re.findall(r'"([^"]+)"', listed[1]) if listed else []
    found["of another shape"] = re.findall(r"size mismatch for ([^:]+):", text)
    parts = [f"{len(names)} {what} ({_first(names)})" for what, names in found.items() if names]
    return " and ".join(parts) or text[:200] or type(error).__name__


def _head_of(name: str) -> str:
    """The name of a model's head in its state dict, of the first one if there are two."""
    cfg: Any = timm.get_pretrained_cfg(name)
    heads = cfg.classifier if cfg is not None else None
    return str(heads[0] if isinstance(heads, list | tuple) else heads)


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
