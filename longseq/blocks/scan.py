"""The orders in which a mixer reads the tokens of an image, and how several readings become one."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from longseq.blocks.hooks import is_hooked
from longseq.blocks.positions import Layout, split_token

DIRECTIONS = ("forward", "bidirectional", "cross", "alternating")
SHARING = ("projections", "all", "none")
MERGES = ("sum", "mean")

# An order reads rows or columns first, from the start or from the end.
ROWS, ROWS_REVERSED, COLUMNS, COLUMNS_REVERSED = "rows", "rows_reversed", "columns", "columns_reversed"
REVERSED = {ROWS_REVERSED: ROWS, COLUMNS_REVERSED: COLUMNS}  # and the orders that they reverse


def are_pairs(orders: tuple[str, ...]) -> bool:
    """Whether orders come in pairs, one and its reverse."""
    pairs = zip(orders[::2], orders[1::2], strict=False)
    return len(orders) % 2 == 0 and all(REVERSED.get(backward) == forward for forward, backward in pairs)


def scan_orders(direction: str, layer: int = 0) -> tuple[str, ...]:
    """Name the orders that `direction` asks of the layer with index `layer`.

    forward reads rows; bidirectional reads rows both ways; cross reads rows and columns both ways; alternating reads
    rows forward in even layers and backward in odd ones.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} is not one of {', '.join(DIRECTIONS)}")
    return {
        "forward": (ROWS,),
        "bidirectional": (ROWS, ROWS_REVERSED),
        "cross": (ROWS, ROWS_REVERSED, COLUMNS, COLUMNS_REVERSED),
        "alternating": (ROWS_REVERSED,) if layer % 2 else (ROWS,),
    }[direction]


def reorder(x: Tensor, order: str, layout: Layout | None) -> Tensor:
    """Bring `x [B, T, ...]` from row order into `order`; the class token keeps its index, reversed orders flip all."""
    if order in (COLUMNS, COLUMNS_REVERSED):
        assert layout is not None
        x = _transpose(x, layout, layout.height, layout.width)
    return x.flip(1) if order in REVERSED else x


def restore(x: Tensor, order: str, layout: Layout | None) -> Tensor:
    """Undo `reorder`."""
    x = x.flip(1) if order in REVERSED else x
    if order in (COLUMNS, COLUMNS_REVERSED):
        assert layout is not None
        x = _transpose(x, layout, layout.width, layout.height)
    return x


def _transpose(x: Tensor, layout: Layout, height: int, width: int) -> Tensor:
    token, patches = split_token(x, layout)
    patches = patches.unflatten(1, (height, width)).transpose(1, 2).flatten(1, 2)
    if token is None:
        return patches
    return torch.cat([patches[:, : layout.token], token, patches[:, layout.token :]], dim=1)


@register_notrace_module  # operations choose their backend by looking at tensors, which a symbolic trace does not have
class Directions(nn.Module):
    """One mixing layer over an image: a mixer, or several, reading the tokens in one or more orders.

    What the orders share decides the parameter count; P counts those of a mixer's two projections, S those of its scan
    (convolution, gates, recurrence), n the orders:

        projections   P + n S   a scan for each order between one pair of projections (Vim, Vision Longhorn)
        all           P + S     one mixer; the orders are stacked along the batch
        none          n (P + S) a mixer for each order

    Mixers that can read an order and its reverse at once (see `Mixer.scan_pair`), but not while a callback watches
    them, nor with hooks on their parts or parts of another class (adapters, quantisation), which must be called.

    Args:
        build: makes one mixer (see `longseq.mixers.Mixer`).
        orders: names of orders, as `scan_orders` gives them.
        share: one of `SHARING`.
        merge: `sum` of the readings or their `mean`.
    """

    def __init__(
        self, build: Callable[[], Any], orders: tuple[str, ...], *, share: str = "projections", merge: str = "sum"
    ) -> None:
        super().__init__()
        if share not in SHARING:
            raise ValueError(f"share_directions={share!r} is not one of {', '.join(SHARING)}")
        if merge not in MERGES:
            raise ValueError(f"merge={merge!r} is not one of {', '.join(MERGES)}")
        self.orders = orders
        self.share = share
        self.merge = merge
        mixers = [build() for _ in range(1 if share == "all" else len(orders))]
        if share == "projections":
            for mixer in mixers[1:]:
                mixer.release_projections()
        self.mixers: Any = nn.ModuleList(mixers)
        self._kinds = [type(part) for part in self.mixers.modules()]

    def forward(self, x: Tensor, layout: Layout | None = None, *, mask: Tensor | None = None) -> Tensor:
        """Mix `x [B, T, D]`.

        Args:
            layout: where the patches stand; needed by orders that read columns.
            mask: `[B, T]`, True at real tokens, for orders that read rows of sequences padded on either side.
        """
        if layout is None and (COLUMNS in self.orders or COLUMNS_REVERSED in self.orders):
            raise ValueError(
                "direction='cross' reads columns and needs the patch grid; pass layout=Layout(height, width, token)"
            )
        first = self.mixers[0]
        if self.share == "none":
            return self._merge(
                [
                    mixer.project_out(_scan(mixer, mixer.project_in(x), order, layout, mask))
                    for mixer, order in zip(self.mixers, self.orders, strict=True)
                ]
            )
        projected = first.project_in(x)
        if first.reads_pairs and are_pairs(self.orders) and not self._is_watched():
            readings = self._read_pairs(projected, layout, mask)
        elif self.share == "all":
            readings = self._read_stacked(projected, layout, mask)
        else:
            readings = [_scan(m, projected, o, layout, mask) for m, o in zip(self.mixers, self.orders, strict=True)]
        return first.project_out(self._merge(readings))

    def _is_watched(self) -> bool:
        """Whether each mixer, or a part of one, must be called by itself."""
        if any(mixer.observed is not None for mixer in self.mixers):
            return True  # what a pair reported together could not be told apart
        parts = list(self.mixers.modules())
        return [type(part) for part in parts] != self._kinds or any(is_hooked(part) for part in parts)

    def _read_pairs(self, projected: Tensor, layout: Layout | None, mask: Tensor | None) -> list[Tensor]:
        """One reading for each pair of orders, the sum of both."""
        orders, mixers = self.orders[::2], list(self.mixers)
        inputs = [reorder(projected, order, layout) for order in orders]
        masks = None if mask is None else [reorder(mask, order, layout) for order in orders]
        if self.share == "all":
            stacked = mixers[0].read_pair(mixers[0], _stack(inputs), None if masks is None else _stack(masks))
            readings = _unstack(stacked, len(orders))
        else:
            pairs = zip(mixers[::2], mixers[1::2], inputs, masks or len(orders) * (None,), strict=True)
            readings = [forward.read_pair(backward, x, real) for forward, backward, x, real in pairs]
        return [restore(reading, order, layout) for reading, order in zip(readings, orders, strict=True)]

    def _read_stacked(self, projected: Tensor, layout: Layout | None, mask: Tensor | None) -> list[Tensor]:
        """All orders in one batch, of which a mixer that can reads the second half from the end."""
        mixer, orders, options = self.mixers[0], self.orders, {}
        if mixer.reads_backwards and are_pairs(orders):
            orders, options = orders[::2] * 2, {"reverse": "second_half"}
        stacked = _stack([reorder(projected, order, layout) for order in orders])
        masks = None if mask is None else _stack([reorder(mask, order, layout) for order in orders])
        y, _ = mixer.read(stacked, mask=masks, output_final_state=False, **options)
        readings = _unstack(y, len(orders))
        return [restore(reading, order, layout) for reading, order in zip(readings, orders, strict=True)]

    def _merge(self, readings: list[Tensor]) -> Tensor:
        total = reduce(torch.add, readings)
        return total / len(self.orders) if self.merge == "mean" else total

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations of a forward pass over one sequence; a multiply-add counts as two."""
        repeated = (len(self.orders) - len(self.mixers)) * self.mixers[0].scan_flops(tokens)
        return sum(mixer.flops(tokens) for mixer in self.mixers) + repeated

    def extra_repr(self) -> str:
        return f"orders={self.orders}, share={self.share!r}, merge={self.merge!r}"


def _stack(readings: list[Tensor]) -> Tensor:
    """Readings in one batch, one after the other."""
    return readings[0] if len(readings) == 1 else torch.cat(readings)


def _unstack(stacked: Tensor, count: int) -> list[Tensor]:
    """Undo `_stack`."""
    # Not by chunk, of which the ONNX exporter does not know the size when that of the batch is open.
    return list(stacked.unflatten(0, (count, -1)).unbind())


def _scan(mixer: Any, projected: Tensor, order: str, layout: Layout | None, mask: Tensor | None) -> Tensor:
    """Scan projected tokens in `order`; the output comes back in row order."""
    options = {}
    if mixer.reads_backwards and order in REVERSED:
        options["reverse"] = True
        order = REVERSED[order]
    mask = None if mask is None else reorder(mask, order, layout)
    y, _ = mixer.read(reorder(projected, order, layout), mask=mask, output_final_state=False, **options)
    return restore(y, order, layout)
