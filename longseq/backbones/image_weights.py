"""Weights of other image models under the names of ours: timm's Vision Transformers and the published Vim."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import resample_patch_embed
from torch import Tensor

from longseq.blocks.patches import grid_of
from longseq.blocks.positions import resize_positions

if TYPE_CHECKING:
    from longseq.backbones.image import ImageBackbone

# The parameters of a reading in `longseq.mixers.mamba.Mamba`, and in Vim's forward and backward reading.
VIM_READINGS = {
    "convolution.weight": ("conv1d.weight", "conv1d_b.weight"),
    "convolution.bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj.weight": ("x_proj.weight", "x_proj_b.weight"),
    "rate_proj.weight": ("dt_proj.weight", "dt_proj_b.weight"),
    "rate_bias": ("dt_proj.bias", "dt_proj_b.bias"),
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
}
VIM_BLOCK = {
    "norm.weight": "norm1.weight",
    "norm.bias": "norm1.bias",
    "mixer.in_proj.weight": "mixer.mixers.0.in_proj.weight",
    "mixer.out_proj.weight": "mixer.mixers.0.out_proj.weight",
    "mixer.gamma": "ls1.gamma",
} | {
    f"mixer.{theirs}": f"mixer.mixers.{reading}.{ours}"
    for ours, both in VIM_READINGS.items()
    for reading, theirs in enumerate(both)
}


def checkpoint_filter_fn(
    state_dict: dict[str, Any], model: ImageBackbone, grid: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Fit a state dict to `model`: other names, positions of another grid, patches of another size.

    The weights of timm's VisionTransformer, whose attention becomes the mixer: `blocks.i.attn.qkv` is
    `blocks.i.mixer.in_proj`, `blocks.i.attn.proj` is `blocks.i.mixer.out_proj`. Positions of its class and register
    tokens are added to these tokens, or kept with `no_embed_class=False`.

    The published weights of Vim (github.com/hustvl/Vim), which need `mixer="mamba"`. They take the mean of both
    readings, as `merge="mean"` does; for `merge="sum"` the output projections are halved. Their class token is where
    the model's is.

    `grid`, the rows and columns of patches, is not part of a state dict; the config.json of a folder that timm loads
    has it. Without a grid, a table of the model's own size is taken as the model's grid, and any other table as a
    square grid, in both cases with or without positions of the prefix tokens. For weights of another oblong grid, build
    the model with their img_size, load them, and call `set_input_size`.

    Raises:
        ValueError: the positions make no square grid, the model has no place for a weight, or its pooling by attention
            has another number of heads than its attention, unlike timm's.
    """
    state_dict = state_dict.get("model", state_dict)
    state = dict(state_dict.get("state_dict", state_dict))
    grid = grid or _stated_grid(model)
    if "norm_f.weight" in state:
        state = _from_vim(state, model)
        own = int("cls_token" in state)
    else:
        own = _prefix_positions(state, model, grid)
        _check_pool_heads(state, model)
        for old, new in ((".attn.qkv.", ".mixer.in_proj."), (".attn.proj.", ".mixer.out_proj.")):
            state = {name.replace(old, new): value for name, value in state.items()}
    if "pos_embed" in state:
        _fit_positions(state, model, own, grid)
    weight, size = state.get("patch_embed.proj.weight"), model.patch_embed.patch_size
    if weight is not None and weight.ndim == 4 and tuple(weight.shape[-2:]) != size:  # resampled as timm does
        state["patch_embed.proj.weight"] = resample_patch_embed(weight, list(size))
    # timm silently drops the weights of a head of another size.
    strange = [name for name in state if not name.startswith("head.") and name not in model.state_dict()]
    if strange:
        raise ValueError(f"the model has no place for the checkpoint's {', '.join(strange[:3])}")
    return state


def _stated_grid(model: ImageBackbone) -> tuple[int, int] | None:
    """The grid stated by the folder from which timm loads: timm keeps the arguments of its config.json."""
    stated: Any = getattr(model, "pretrained_model_args", None) or {}
    if "img_size" not in stated or "patch_size" not in stated:
        return None
    size, patch, stride = (stated.get(key) for key in ("img_size", "patch_size", "stride"))
    return grid_of(size, patch, stride, padded=stated.get("dynamic_img_pad", False))


def _check_pool_heads(state: dict[str, Tensor], model: ImageBackbone) -> None:
    """timm's models pool with as many heads as their attention has, a number that no weight shows."""
    if model.attn_pool is None or not any(name.startswith("attn_pool.") for name in state):
        return
    blocks: Any = model.blocks
    heads = {getattr(reader, "num_heads", None) for block in blocks for reader in block.mixer.readers}
    pooled = model.attn_pool.num_heads
    if any(".attn.qkv." in name for name in state) and model.mixer_name == "attention" and heads != {pooled}:
        raise ValueError(f"the checkpoint pools with the heads of its attention: give pool_num_heads={heads.pop()}")


def _prefix_positions(state: dict[str, Tensor], model: ImageBackbone, grid: tuple[int, int] | None) -> int:
    """The number of rows of `pos_embed` for prefix tokens."""
    if "pos_embed" not in state:
        return 0
    positions, patches = state["pos_embed"].shape[1], model.patch_embed.num_patches
    prefix = sum(state[name].shape[1] for name in ("cls_token", "reg_token") if name in state)
    if grid is not None and positions - math.prod(grid) in (0, prefix):
        return positions - math.prod(grid)
    if not any(".attn.qkv." in name for name in state):
        return 0 if positions == patches else model.num_prefix_positions
    if positions in (patches, patches + prefix):
        return positions - patches
    return prefix if positions > prefix and math.isqrt(positions - prefix) ** 2 == positions - prefix else 0


def _fit_positions(state: dict[str, Tensor], model: ImageBackbone, own: int, grid: tuple[int, int] | None) -> None:
    """Fit `pos_embed`, whose first `own` rows are for prefix tokens, to the model's grid and layout."""
    prefix, table = state["pos_embed"].split([own, state["pos_embed"].shape[1] - own], dim=1)
    cells = table.shape[1]
    if grid is not None and math.prod(grid) == cells:
        if grid != model.patch_embed.grid_size:
            table = resize_positions(table, grid, model.patch_embed.grid_size)
    elif cells != model.patch_embed.num_patches:
        side = math.isqrt(cells)
        if side * side != cells:
            raise ValueError(f"pos_embed has {cells} cells, which is no square grid")
        table = resize_positions(table, (side, side), model.patch_embed.grid_size)
    if model.num_prefix_positions:
        if not own:
            prefix = table.new_zeros(1, model.num_prefix_positions, table.shape[2])
        table = torch.cat([prefix, table], dim=1)
    elif own:
        for name in ("cls_token", "reg_token"):
            if name in state:
                count = state[name].shape[1]
                state[name] = state[name] + prefix[:, :count]
                prefix = prefix[:, count:]
    state["pos_embed"] = table


def _from_vim(theirs: dict[str, Tensor], model: ImageBackbone) -> dict[str, Tensor]:
    """The weights of Vim under our names, with the position of the class token first."""
    ours = {}
    for name, value in theirs.items():
        block = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if block:
            part = VIM_BLOCK.get(block[2], block[2])
            if part.endswith("convolution.weight"):
                value = value.squeeze(1)
            if part.endswith("out_proj.weight") and model.merge == "sum":
                value = value / 2
            ours[f"blocks.{block[1]}.{part}"] = value
        else:
            ours[name.replace("norm_f.", "norm.")] = value
    if "cls_token" in ours and "pos_embed" in ours:
        table = ours["pos_embed"]
        place = (table.shape[1] - 1) // 2 if model.class_token == "middle" else 0
        ours["pos_embed"] = torch.cat([table[:, place : place + 1], table[:, :place], table[:, place + 1 :]], dim=1)
    return ours
