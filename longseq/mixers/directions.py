"""Layers that read a sequence in several directions, and the function that builds the reading a model asks for."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from longseq.arguments import check_choice
from longseq.blocks.hooks import is_hooked, is_plain
from longseq.blocks.positions import Layout
from longseq.blocks.reading import (
    BACKWARD,
    COLUMNS,
    REVERSED,
    reading_orders,
    reorder,
    restore,
)
from longseq.blocks.traces import whole_in_traces
from longseq.kernels.packing import Packing
from longseq.mixers.base import Mixer, ScanOptions, add_readings, check_rows, hide_padding
from longseq.mixers.registry import create, get

SHARING = ("projections", "none")
MERGES = ("sum", "mean")

NO_STATE = "a reading in several directions has no state and no steps: use direction='forward'"

AnyMixer = Mixer[Any]


class Directions(nn.Module):
    """Reads in several orders: both ways along a sequence (bidirectional), or along rows and columns (cross).

    `share` decides the parameters. With P for a mixer's two projections, S for its scan (convolution, gates,
    recurrence) and n orders:

        projections   P + n S   a scan for each order between one pair of projections (Vim, Vision Longhorn)
        none          n (P + S) a mixer for each order

    In the state dict, `mixers.i` is the mixer of order i. `mixers.0` has the shared projections.

    Mixers with `Mixer.scan_pair` read an order and its reverse in one call. They read one order after the other if they
    or their submodules have hooks or were replaced (adapters, quantisation), and for packed rows. A hook on such a
    mixer sees the projected tokens and the reading before the output projection.

    The two mixers of a pair are separate modules, whose parameters `scan_pair` stacks in each call; no measurement
    shows the cost. One module with parameters `[2, ...]` would break adapters and quantisation, which look for
    `nn.Linear` with two-dimensional weights, and optimizers that decide by shapes (timm decays no vectors, Muon takes
    matrices).

    Args:
        build: makes one mixer (see `longseq.mixers.Mixer`).
        orders: the names of orders that `reading_orders` returns, each followed by its reverse.
        share: one of `SHARING`.
        merge: "sum" or "mean" of the readings.
    """

    def __init__(
        self, build: Callable[[], AnyMixer], orders: tuple[str, ...], *, share: str = "projections", merge: str = "sum"
    ) -> None:
        super().__init__()
        check_choice("share_directions", share, SHARING)
        check_choice("merge", merge, MERGES)
        self.orders = orders
        self.share = share
        self.merge = merge
        mixers = [build() for _ in orders]
        if share == "projections":
            for mixer in mixers[1:]:
                mixer.release_projections()
        self.mixers = nn.ModuleList(mixers)
        self._kinds = [type(part) for part in self.mixers.modules()]

    @property
    def readers(self) -> list[AnyMixer]:
        """The mixer of each order."""
        mixers: list[Any] = list(self.mixers)
        return mixers

    @property
    def makes_values(self) -> bool:
        """Whether the mixers do (see `Mixer`)."""
        return self.readers[0].makes_values

    @property
    def reads_values(self) -> bool:
        """Whether the mixers do (see `Mixer`)."""
        return self.readers[0].reads_values

    @whole_in_traces
    def forward(
        self,
        x: Tensor,
        state: None = None,
        *,
        layout: Layout | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, None]:
        """Mix `x [B, T, D]`; arguments as for `longseq.mixers.Mixer.forward`.

        Returns:
            `y [B, T, D]`, and None instead of a state: later tokens change every output.

        Raises:
            ValueError: a state is given; packed rows are to be read in columns; `cu_seqlens` or `mask` does not fit
                `x`.
        """
        if state is not None:
            raise ValueError(NO_STATE)
        packing = check_rows(x, cu_seqlens, mask)
        x = hide_padding(x, mask)
        if packing is not None and COLUMNS in self.orders:
            raise ValueError("direction='cross' does not read packed sequences")
        readers = self.readers
        first = readers[0]
        if self.share == "none":
            return self._merge(
                [
                    mixer.project_out(_read(mixer, mixer.project_in(own), order, layout, mask, packing))
                    for mixer, own, order in zip(readers, self._inputs(x), self.orders, strict=True)
                ]
            ), None
        projected = first.project_in(x)
        # Operations read half of a batch backward, but packed sequences in one direction.
        if packing is None and first.reads_pairs and self._is_plain():
            readings = self._read_pairs(projected, layout, mask)
        else:
            pairs = zip(readers, self._inputs(projected), self.orders, strict=True)
            readings = [_read(mixer, own, order, layout, mask, packing) for mixer, own, order in pairs]
        return first.project_out(self._merge(readings)), None

    def read_order(
        self, index: int, x: Tensor, state: Any = None, *, cu_seqlens: Packing | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Read a segment `x [B, T, D]` of sequences in the order `index`; `join` makes the output of all readings.

        Args:
            index: of an order along the sequence, forward or backward.
            state: the state after the previous segment in this order; for a backward order, after the tokens behind
                `x`.
            cu_seqlens: of packed pieces; the state has a row for each.

        Returns:
            The reading `[B, T, I]`, in the order of `x`, and the state after its last token in this order, or None.
        """
        mixer = self.readers[index]
        projecting = mixer if self.share == "none" else self.readers[0]
        options = ScanOptions(cu_seqlens, None, self.orders[index] in REVERSED, output_final_state)
        y, state = _scan(mixer, projecting.project_in(self._inputs(x)[index]), options, state)
        return (mixer.project_out(y) if self.share == "none" else y), state

    def join(self, readings: list[Tensor]) -> Tensor:
        """The output `[B, T, D]` of the readings of all orders, from `read_order`."""
        merged = self._merge(readings)
        return merged if self.share == "none" else self.readers[0].project_out(merged)

    def step(self, x: Tensor, state: Any) -> NoReturn:
        """Raise ValueError: later tokens change the output of a token."""
        raise ValueError(NO_STATE)

    def _is_plain(self) -> bool:
        """False if a part has hooks or was replaced: each mixer must then be called by itself."""
        parts = list(self.mixers.modules())
        return [type(part) for part in parts] == self._kinds and all(map(is_plain, parts))

    def _read_pairs(self, projected: Tensor, layout: Layout | None, mask: Tensor | None) -> list[Tensor]:
        """Read each order and its reverse in one call; return one sum for each pair."""
        orders, readers = self.orders[::2], self.readers
        pairs = zip(self._inputs(projected, 2), orders, strict=True)
        inputs = [reorder(own, order, layout) for own, order in pairs]
        masks = [None if mask is None else reorder(mask, order, layout) for order in orders]
        read = zip(readers[::2], readers[1::2], inputs, masks, strict=True)
        readings = [forward.read_pair(backward, x, real) for forward, backward, x, real in read]
        return [restore(reading, order, layout) for reading, order in zip(readings, orders, strict=True)]

    def _inputs(self, x: Tensor, orders: int = 1) -> list[Tensor]:
        """The input of each reading, or of each pair for `orders=2`: with its values if they are behind the tokens."""
        count = len(self.orders) // orders
        tokens, *values = x.split(self.readers[0].d_model, dim=-1) if self.reads_values else (x,)
        if not values or count == 1:
            return count * [x]
        return [torch.cat((tokens, *values[i * orders : (i + 1) * orders]), dim=-1) for i in range(count)]

    def _merge(self, readings: list[Tensor]) -> Tensor:
        channels = self.readers[0].d_model if self.makes_values else readings[0].shape[-1]
        return add_readings(readings, channels, len(self.orders) if self.merge == "mean" else 1)

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations of a forward pass over one sequence; a multiply-add counts as two."""
        return sum(mixer.flops(tokens) for mixer in self.readers)

    def extra_repr(self) -> str:
        return f"orders={self.orders}, share={self.share!r}, merge={self.merge!r}"


def make_reading(
    mixer: str,
    d_model: int,
    *,
    options: Mapping[str, Any],
    direction: str,
    layer: int = 0,
    share: str = "projections",
    merge: str = "sum",
    backend: str = "auto",
) -> AnyMixer | Directions:
    """Build the reading of a layer: a mixer for one direction, `Directions` for several.

    For several directions, a mixer that can see all tokens in one pass (attention) is built with `causal=False`.

    Args:
        mixer, options: a registered name, and keywords of its constructor.
        direction: one of `longseq.blocks.reading.DIRECTIONS`.
        layer: the index of the layer among the layers with its mixer, for direction="alternating".
        share, merge: see `Directions`.
        backend: the kernel backend of the mixer; with auto, the options decide.

    Raises:
        ValueError: an option has an unknown value, or sets `causal`.
    """
    check_choice("share_directions", share, SHARING)
    check_choice("merge", merge, MERGES)
    orders = reading_orders(direction, layer)
    chosen = dict(options)
    if "causal" in chosen:
        raise ValueError("the direction decides causal: leave it out of mixer_options")
    if backend != "auto":
        chosen["backend"] = backend
    sees_all = get(mixer).supports_noncausal and len(orders) > 1
    if get(mixer).supports_noncausal:
        chosen["causal"] = not sees_all
    build = partial(create, mixer, d_model, **chosen)
    if len(orders) > 1 and not sees_all:
        return Directions(build, orders, share=share, merge=merge)
    reading = build()
    reading.reverse = not sees_all and orders == (BACKWARD,)
    return reading


def named_readings(model: nn.Module) -> Iterator[tuple[str, AnyMixer | Directions]]:
    """Yield the readings of a model's blocks by name, without the mixers inside a `Directions`."""
    parts: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, Directions):
            parts.update(module.mixers)
        if isinstance(module, Directions | Mixer) and module not in parts:
            yield name, module


def _read(
    mixer: AnyMixer, projected: Tensor, order: str, layout: Layout | None, mask: Tensor | None, packing: Packing | None
) -> Tensor:
    """Scan projected tokens in `order`; the output comes back in row order."""
    along, reverse = REVERSED.get(order, order), order in REVERSED
    mask = None if mask is None else reorder(mask, along, layout)
    projected = reorder(projected, along, layout)
    y, _ = _scan(mixer, projected, ScanOptions(packing, mask, reverse, output_final_state=False))
    return restore(y, along, layout)


def _scan(mixer: AnyMixer, projected: Tensor, options: ScanOptions, state: Any = None) -> tuple[Tensor, Any]:
    """`Mixer.read`; a mixer with hooks is called, because hooks run in calls only."""
    if is_hooked(mixer):
        return mixer(projected, state, projected=True, **options._asdict())
    return mixer.read(projected, state, options)
