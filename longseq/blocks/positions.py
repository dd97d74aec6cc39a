"""Positions of tokens: embeddings learned on the patch grid, and the index of a class token inserted at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

TOKEN_PLACES = ("middle", "first", "none")


class Layout(NamedTuple):
    """A sequence of `height * width` patches in row order, with a class token at index `token`, or without one."""

    height: int
    width: int
    token: int | None


def layout_of(height: int, width: int, place: str) -> Layout:
    """Lay out a patch grid with its class token at `place`, one of `TOKEN_PLACES`."""
    if place not in TOKEN_PLACES:
        raise ValueError(f"class_token={place!r} is not one of {', '.join(TOKEN_PLACES)}")
    token = {"middle": height * width // 2, "first": 0, "none": None}[place]
    return Layout(height, width, token)


def insert_token(patches: Tensor, token: Tensor, layout: Layout) -> Tensor:
    """Put `token [1 or B, 1, D]` into `patches [B, N, D]` at its index: `[B, N + 1, D]`."""
    token = token.expand(patches.shape[0], -1, -1)
    return torch.cat([patches[:, : layout.token], token, patches[:, layout.token :]], dim=1)


def split_token(x: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor]:
    """Take the class token `[B, 1, ...]` out of `x [B, T, ...]`; what remains is the patches in row order."""
    if layout.token is None:
        return None, x
    patches = torch.cat([x[:, : layout.token], x[:, layout.token + 1 :]], dim=1)
    return x[:, layout.token : layout.token + 1], patches


def move_token_first(x: Tensor, layout: Layout) -> Tensor:
    """Move the class token of `x [B, T, ...]` from its index to the front of the patches."""
    token, patches = split_token(x, layout)
    return patches if token is None else torch.cat([token, patches], dim=1)


def move_token_back(x: Tensor, layout: Layout) -> Tensor:
    """Undo `move_token_first`."""
    return x if layout.token is None else insert_token(x[:, 1:], x[:, :1], layout)


def resize_positions(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Interpolate a position table `[1, H W, D]` of a patch grid to another grid (bicubic, with antialiasing)."""
    return resample_abs_pos_embed(table, new_size=list(new_grid), old_size=list(grid), num_prefix_tokens=0)
