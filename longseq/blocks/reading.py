"""The orders in which a layer reads the tokens of a sequence."""

import torch
from torch import Tensor

from longseq.arguments import check_choice
from longseq.blocks.positions import Layout, split_prefix

DIRECTIONS = ("forward", "bidirectional", "cross", "alternating")

# An order reads the tokens as given, or the columns of an image; from the start or from the end.
FORWARD, BACKWARD, COLUMNS, COLUMNS_BACKWARD = "forward", "backward", "columns", "columns_backward"
# Each backward order, and the order that it reverses.
REVERSED = {BACKWARD: FORWARD, COLUMNS_BACKWARD: COLUMNS}


def reading_orders(direction: str, layer: int = 0) -> tuple[str, ...]:
    """Name the orders in which the layer with index `layer` reads for `direction`.

    forward reads from the first token to the last; bidirectional reads both ways; cross reads the rows and the columns
    of an image both ways; alternating reads forward in even layers and backward in odd ones. ValueError for other
    directions.
    """
    check_choice("direction", direction, DIRECTIONS)
    return {
        "forward": (FORWARD,),
        "bidirectional": (FORWARD, BACKWARD),
        "cross": (FORWARD, BACKWARD, COLUMNS, COLUMNS_BACKWARD),
        "alternating": (BACKWARD,) if layer % 2 else (FORWARD,),
    }[direction]


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
