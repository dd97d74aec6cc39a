"""Positions of tokens: embeddings learned on the patch grid, and the index of prefix tokens inserted at run time.

Prefix tokens, as timm calls them, are the class token and the register tokens after it. They are not on the grid.
"""

from typing import NamedTuple

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor
from torch.nn import functional

from longseq.arguments import check_choice
from longseq.blocks.precision import at_least_float32
from longseq.blocks.traces import makes_trace

TOKEN_PLACES = ("middle", "first", "none")


class Layout(NamedTuple):
    """A sequence of `height * width` patches in row order, with `prefix` prefix tokens at index `token`, or None."""

    height: int
    width: int
    token: int | None
    prefix: int = 1


def layout_of(height: int, width: int, place: str, registers: int = 0) -> Layout:
    """Lay out a patch grid with a class token at `place`, one of `TOKEN_PLACES`, then registers, or only registers."""
    check_choice("class_token", place, TOKEN_PLACES)
    token = {"middle": height * width // 2, "first": 0, "none": 0 if registers else None}[place]
    return Layout(height, width, token, registers + (place != "none"))


def insert_prefix(patches: Tensor, prefix: Tensor, layout: Layout) -> Tensor:
    """Put `prefix [1 or B, P, D]` into `patches [B, N, D]` at its index: `[B, N + P, D]`."""
    prefix = prefix.expand(patches.shape[0], -1, -1)
    return torch.cat([patches[:, : layout.token], prefix, patches[:, layout.token :]], dim=1)


def split_prefix(x: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor]:
    """Split `x [B, T, ...]` into the prefix tokens `[B, P, ...]`, or None, and the patches in row order."""
    if layout.token is None:
        return None, x
    end = layout.token + layout.prefix
    return x[:, layout.token : end], torch.cat([x[:, : layout.token], x[:, end:]], dim=1)


def move_prefix_first(x: Tensor, layout: Layout) -> Tensor:
    """Move the prefix tokens of `x [B, T, ...]` from their index to the front of the patches."""
    prefix, patches = split_prefix(x, layout)
    return patches if prefix is None else torch.cat([prefix, patches], dim=1)


def move_prefix_back(x: Tensor, layout: Layout) -> Tensor:
    """Undo `move_prefix_first`."""
    return x if layout.token is None else insert_prefix(x[:, layout.prefix :], x[:, : layout.prefix], layout)


def resize_positions(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int], prefix: int = 0) -> Tensor:
    """Interpolate positions `[1, prefix + H W, D]` to another grid (bicubic, antialiased); prefix rows stay."""
    if makes_trace():
        # timm returns the table itself for its own grid, and a trace would record that for every grid. Interpolating to
        # the same grid changes no number.
        image = at_least_float32(table[:, prefix:]).unflatten(1, grid).permute(0, 3, 1, 2)
        image = functional.interpolate(image, size=list(new_grid), mode="bicubic", antialias=True)
        return torch.cat([table[:, :prefix], image.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)
    return resample_abs_pos_embed(table, new_size=list(new_grid), old_size=list(grid), num_prefix_tokens=prefix)
