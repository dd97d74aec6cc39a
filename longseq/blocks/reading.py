"""The reading of a sequence by a layer: its interface, and the orders in which tokens are read."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longseq.blocks.positions import Layout, split_prefix
from longseq.kernels.packing import Packing
from longseq.state import StateT

DIRECTIONS = ("forward", "bidirectional", "cross", "alternating")

# An order reads the tokens as given, or the columns of an image; from the start or from the end.
FORWARD, BACKWARD, COLUMNS, COLUMNS_BACKWARD = "forward", "backward", "columns", "columns_backward"
# Each backward order, and the order that it reverses.
REVERSED = {BACKWARD: FORWARD, COLUMNS_BACKWARD: COLUMNS}


class Reading(Protocol[StateT]):
    """The part of a residual block that mixes tokens: `y, state = reading(x, state)`.

    `longseq.mixers.Mixer` reads in one direction, `longseq.mixers.directions.Directions` in several. `orders` names the
    orders in which the tokens are read.
    """

    makes_values: bool
    reads_values: bool

    @property
    def orders(self) -> tuple[str, ...]: ...

    def __call__(
        self,
        x: Tensor,
        state: StateT | None = None,
        *,
        layout: Layout | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, StateT | None]:
        """Read `x [B, T, D]`; the arguments are those of `longseq.mixers.Mixer.forward`, and `layout` is needed for
        columns.

        Returns:
            `y [B, T, D]`, and the state after the last real token, or None. A reading of several directions has none.
        """

    def step(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Read one more token `x [B, D]`; ValueError where a token's output depends on later tokens."""

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one sequence; a multiply-add counts as two."""


def reading_orders(direction: str, layer: int = 0) -> tuple[str, ...]:
    """Name the orders in which the layer with index `layer` reads for `direction`.

    forward reads from the first token to the last; bidirectional reads both ways; cross reads the rows and the columns
    of an image both ways; alternating reads forward in even layers and backward in odd ones. ValueError for other
    directions.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} is not one of {', '.join(DIRECTIONS)}")
    return {
        "forward": (FORWARD,),
        "bidirectional": (FORWARD, BACKWARD),
        "cross": (FORWARD, BACKWARD, COLUMNS, COLUMNS_BACKWARD),
        "alternating": (BACKWARD,) if layer % 2 else (FORWARD,),
    }[direction]


def are_pairs(orders: tuple[str, ...]) -> bool:
    """Whether orders come in pairs, one and its reverse."""
    pairs = zip(orders[::2], orders[1::2], strict=False)
    return len(orders) % 2 == 0 and all(REVERSED.get(backward) == forward for forward, backward in pairs)


def reorder(x: Tensor, order: str, layout: Layout | None) -> Tensor:
    """Bring `x [B, T, ...]` from row order into `order`.

    In column order the prefix tokens keep their index. Backward orders reverse all tokens, prefix tokens included.
    """
    if order in (COLUMNS, COLUMNS_BACKWARD):
        assert layout is not None
        x = _transpose(x, layout, layout.height, layout.width)
    return x.flip(1) if order in REVERSED else x


def restore(x: Tensor, order: str, layout: Layout | None) -> Tensor:
    """Undo `reorder`."""
    x = x.flip(1) if order in REVERSED else x
    if order in (COLUMNS, COLUMNS_BACKWARD):
        assert layout is not None
        x = _transpose(x, layout, layout.width, layout.height)
    return x


def _transpose(x: Tensor, layout: Layout, height: int, width: int) -> Tensor:
    prefix, patches = split_prefix(x, layout)
    patches = patches.unflatten(1, (height, width)).transpose(1, 2).flatten(1, 2)
    if prefix is None:
        return patches
    return torch.cat([patches[:, : layout.token], prefix, patches[:, layout.token :]], dim=1)
