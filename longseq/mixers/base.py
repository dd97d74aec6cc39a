"""The contract of a token mixer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.arguments import KeepsArguments
from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.hooks import has_observers, step_by_call
from longseq.blocks.pairs import repeat_rows
from longseq.blocks.positions import Layout
from longseq.blocks.reading import BACKWARD, FORWARD
from longseq.blocks.recompute import checkpoint_if
from longseq.blocks.sharding import gathers_parameters
from longseq.blocks.traces import whole_in_traces
from longseq.kernels.checks import check_mask
from longseq.kernels.dispatch import backend_of_local, backend_of_step, is_exporting
from longseq.kernels.packing import Packing, pack_like
from longseq.kernels.reading import Reverse
from longseq.state import Device, StateT, loadable, map_state, state_tensors


class ScanOptions(NamedTuple):
    """How a scan reads its tokens.

    cu_seqlens: the borders of sequences packed into one row.
    mask: `[B, T]`, True at real tokens.
    reverse: True reads from the last token to the first; the given state is then the state after the tokens behind the
        last one. "second_half", in `scan_pair` only, does so for the second half of the batch.
    output_final_state: False skips the state.
    """

    cu_seqlens: Packing | None = None
    mask: Tensor | None = None
    reverse: Reverse = False
    output_final_state: bool = True

    @classmethod
    def of_pair(cls, mask: Tensor | None) -> ScanOptions:
        """For rows `[2 B, ...]` that two mixers read, the second half backward; `mask` is that of B rows."""
        return cls(mask=repeat_rows(mask), reverse="second_half", output_final_state=False)


ALL_TOKENS = ScanOptions()


class Mixer(KeepsArguments, nn.Module, Generic[StateT]):
    """A layer that mixes information along a sequence: project in, scan, project out.

        y, state = mixer(x, state)              x, y [B, T, d_model]
        y_t, state = mixer.step(x_t, state)     x_t, y_t [B, d_model]

    `in_proj` and `out_proj` act on each token by itself. Everything that looks along the sequence happens between them,
    in `scan`: convolution, gates, recurrence, output norm. Two directions can therefore share their projections.

    A subclass creates the two projections and defines `scan`, `scan_step`, `initial_state` and `scan_flops`. `StateT`
    is the type of its state, a named tuple. A whole sequence, any split of it with the state carried over, and
    token-by-token steps must give the same numbers. A mixer that looks back before it projects sets `in_proj` to None
    and overrides `project_in` to return the tokens unchanged.

    Class attributes:
        paper: the source of the layer.
        operations: names of the `longseq.kernels` operations that `scan` calls.
        own_backends: further backends, besides "auto" and "torch", of a class without `operations`.
        no_weight_decay_names: parameters exempt from weight decay (see `longseq.parameters`).
        learning_rate_scales: parameters that learn at a multiple of the others' rate, and the multiple.
        supports_noncausal: the constructor takes `causal=False`, with which one pass sees all tokens.
        reads_backwards: `scan` follows `ScanOptions.reverse`; other mixers are given flipped tokens.
        reads_pairs: the class defines `scan_pair`.
        growing_state: the state keeps all tokens, in their type. False: its size is constant, and its floating-point
            tensors are float32 (float64 for float64 inputs).
        preallocates: `preallocate` gives the state fixed buffers.
        recomputable: `recompute` saves memory. False if `scan` saves little more than its arguments.
        piece_multiple: cutting a sequence at multiples of this number of tokens, counted from the first token that the
            layer reads, gives the same numbers as the whole. Above 1, other cuts give other numbers.

    Attributes:
        arguments: the constructor's arguments (see `KeepsArguments`).
        reverse: set by models: read from the last token to the first. `forward` then takes the state of the tokens
            after `x` and returns the state before them with `x` read; `step` reads the token before that.
        recompute: set by models: the backward pass repeats `scan` instead of saving its activations.
        makes_values: set by `place_in_model`: behind its I channels, a reading has values for later layers,
            `d_model` channels for each order, which `project_out` leaves as they are.
        reads_values: set by `place_in_model`: the input may have such values behind its `d_model` channels; those for a
            pair are side by side.
    """

    paper: ClassVar[str] = ""
    operations: ClassVar[tuple[str, ...]] = ()
    own_backends: ClassVar[tuple[str, ...]] = ()
    no_weight_decay_names: ClassVar[tuple[str, ...]] = ()
    learning_rate_scales: ClassVar[Mapping[str, float]] = {}
    supports_noncausal: ClassVar[bool] = False
    reads_backwards: ClassVar[bool] = False
    reads_pairs: ClassVar[bool] = False
    preallocates: ClassVar[bool] = False
    recomputable: ClassVar[bool] = True

    growing_state: bool = False
    piece_multiple: int = 1
    reverse: bool = False
    recompute: bool = False
    makes_values: bool = False
    reads_values: bool = False

    in_proj: nn.Linear | None
    out_proj: nn.Linear | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        states = [state for base in getattr(cls, "__orig_bases__", ()) for state in get_args(base)]
        for state in states:
            for each in get_args(state) or (state,):  # a union has several
                if isinstance(each, type) and issubclass(each, tuple):
                    loadable(each)

    def __init__(self, d_model: int, *, backend: str = "auto") -> None:
        super().__init__()
        if not self.operations and backend not in ("auto", "torch", *self.own_backends):
            raise ValueError(f"{type(self).__name__} has no backend {backend!r}")
        self.d_model = d_model
        self.backend = backend

    @property
    def projections(self) -> list[nn.Linear]:
        """The linear layers outside `scan`."""
        return [layer for layer in (self.in_proj, self.out_proj) if layer is not None]

    @property
    def orders(self) -> tuple[str, ...]:
        """The one order in which this layer reads."""
        return (BACKWARD if self.reverse else FORWARD,)

    @property
    def readers(self) -> list[Self]:
        """The mixer of each order: this one."""
        return [self]

    @whole_in_traces
    def forward(
        self,
        x: Tensor,
        state: StateT | None = None,
        *,
        layout: Layout | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
        projected: bool = False,
        reverse: Reverse | None = None,
    ) -> tuple[Tensor, StateT | None]:
        """Mix a batch of sequences.

        Args:
            x: `[B, T, d_model]`.
            state: the state of an earlier call; None starts a sequence.
            layout: the grid of an image's patches; ignored here.
            cu_seqlens: `[N + 1]` integers, the borders of N sequences packed into one row (B = 1), or their `Packing`;
                the state then has N rows.
            mask: `[B, T]`, True at real tokens of rows that are not packed. Padding may hold any values and leaves the
                state unchanged; its outputs are undefined.
            output_final_state: False skips the state and returns None.
            projected: x is the result of `project_in`, and y the input of `project_out`.
            reverse: the direction, instead of the attribute.

        Returns:
            `y [B, T, d_model]` and the state after the last real token, or None.

        Raises:
            ValueError: `cu_seqlens`, `mask` or `state` does not fit `x`.
        """
        packing = check_rows(x, cu_seqlens, mask)
        check_state_rows(state, x.shape[0] if packing is None else packing.count)
        options = ScanOptions(packing, mask, self.reverse if reverse is None else reverse, output_final_state)
        y, state = self.read(x if projected else self.project_in(hide_padding(x, mask)), state, options)
        return y if projected else self.project_out(y), state

    def read(
        self, projected: Tensor, state: StateT | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, StateT | None]:
        """`scan` in either direction, with activation checkpointing if the model sets `recompute`.

        Mixers without `reads_backwards` flip the tokens before and after the scan.
        """
        packing, mask, reverse, _ = options
        turned = bool(reverse) and not self.reads_backwards
        if turned:
            projected, mask = projected.flip(1), None if mask is None else mask.flip(1)
            if packing is not None:  # the last sequence comes first, and so does its state
                packing, state = packing.turned(), map_state(lambda x: x.flip(0), state)
            options = options._replace(cu_seqlens=packing, mask=mask, reverse=False)
        y, last = checkpoint_if(self.recompute and self.recomputable, self.scan, projected, state, options)
        if turned:
            y, last = y.flip(1), last if packing is None else map_state(lambda x: x.flip(0), last)
        return y, last

    def read_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        """`scan_pair`, with activation checkpointing if the model sets `recompute`."""
        return checkpoint_if(self.recompute and self.recomputable, self.scan_pair, backward, projected, mask)

    @gathers_parameters
    def step(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Mix one more token: `x [B, d_model]` and the state before it give `y [B, d_model]` and the state after it.

        Raises ValueError for the state of another number of sequences.
        """
        check_state_rows(state, x.shape[0])
        if has_observers(self):
            return step_by_call(self, x, state)
        y, state = self.read_step(self.project_in(x), state)
        return self.project_out(y), state

    def read_step(self, projected: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """`scan_step`, with what `read` does around `scan`."""
        return self.scan_step(projected, state)

    @property
    def step_backend(self) -> str:
        """The backend for the one-token forms of the operations."""
        return backend_of_step(self.backend)

    @property
    def local_backend(self) -> str:
        """The backend for the operations that act on each token by itself."""
        return backend_of_local(self.backend)

    def project_in(self, x: Tensor) -> Tensor:
        """Project tokens `[..., d_model]` to the input of `scan`, `[..., P]`."""
        assert self.in_proj is not None, "this copy only scans: its projections belong to another mixer"
        return self.in_proj(x)

    def project_out(self, y: Tensor) -> Tensor:
        """Project the output of `scan`, `[..., I]`, back to tokens `[..., d_model]`."""
        assert self.out_proj is not None, "this copy only scans: its projections belong to another mixer"
        return self.out_proj(y)

    def scan(
        self, projected: Tensor, state: StateT | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, StateT | None]:
        """Scan projected tokens `[B, T, P]` along the sequence; returns `[B, T, I]`, and the state if it is wanted."""
        raise NotImplementedError

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the sum of two scans: by this mixer from the first token on, and by `backward` from the last token on.

        `backward` has the same class and options. Each operation over sequences runs once for both scans and reads the
        second half of its rows from the end. Submodules are mostly bypassed, so `Directions` calls `scan` instead where
        they have hooks or were replaced, and for packed rows.
        """
        raise NotImplementedError

    def scan_step(self, projected: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Scan one projected token `[B, P]`; returns `[B, I]` and the state."""
        raise NotImplementedError

    def call_options(self, options: ScanOptions) -> dict[str, Any]:
        """The options of an operation over sequences, except for the mask."""
        return {
            "output_final_state": options.output_final_state,
            "cu_seqlens": options.cu_seqlens,
            "reverse": options.reverse,
            "backend": self.backend,
        }

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> StateT:
        """Return the state before the first token: a typed tuple of tensors `[batch, ...]`.

        `dtype` is the type of the inputs. Recurrent memories are float32, or float64 for float64.
        """
        raise NotImplementedError

    def preallocate(self, state: StateT, max_length: int) -> StateT:
        """Return the state with room for sequences of `max_length` tokens in all, which steps fill in place.

        States of constant size, and of mixers without `preallocates`, are returned as they are. The room can be
        enlarged later, by copying. Raises ValueError if the state has more than `max_length` tokens.
        """
        return state

    def trim(self, state: StateT) -> StateT:
        """Return the state in the form that `forward` returns, without the room from `preallocate`."""
        return state

    def room(self, state: StateT) -> int | None:
        """Count the tokens for which a preallocated state has room; None: any number."""
        return None

    def scan_flops(self, tokens: int) -> int:
        """Count the floating-point operations of `scan` over one sequence, the recurrence in its one-token form.

        Linear layers and short convolutions are left out: `flops` counts them.
        """
        raise NotImplementedError

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations of a forward pass over one sequence; a multiply-add counts as two."""
        convolutions = sum(part.flops(tokens) for part in self.modules() if isinstance(part, ShortConvolution))
        layers = [part for part in self.modules() if isinstance(part, nn.Linear)]
        return 2 * tokens * count_weights(layers) + convolutions + self.scan_flops(tokens)

    def reset_parameters(self) -> None:
        """Set the mixer's initial parameters and buffers, after the `reset_parameters` of submodules."""

    def place_in_model(self, layer: int, layers: int) -> None:
        """The index of this layer among the layers with its mixer, and their number, for models to call.

        They call `reset_parameters` afterwards, because parameters and initial values may depend on the place.
        """

    def release_projections(self) -> None:
        """Keep only the scan, for a mixer that shares another one's projections."""
        for name in ("in_proj", "out_proj"):
            self._modules.pop(name, None)  # a None among the submodules is not what all tools for models expect
            setattr(self, name, None)


def check_rows(x: Tensor, cu_seqlens: Tensor | Packing | None, mask: Tensor | None) -> Packing | None:
    """Return the packing of tokens `x [B, T, ...]`, or None; ValueError if the packing or mask does not fit."""
    if cu_seqlens is not None and mask is not None:
        raise ValueError("mask and cu_seqlens are both given, and packed sequences have no padding")
    if mask is not None and not is_exporting():
        check_mask("mixer", mask, "x", x)
    return pack_like(cu_seqlens, x)


def check_state_rows(state: Any, rows: int) -> None:
    """Raise ValueError if the tensors of a state do not have `rows` rows."""
    for _, part in [] if is_exporting() else state_tensors(state):
        if part.dim() and part.shape[0] != rows:
            raise ValueError(f"the state is one of {part.shape[0]} sequences, and {rows} are read")


def hide_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x [B, T, D]` with zeros at padding: multiplying by a mask later would keep NaN."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)


def add_readings(readings: Sequence[Tensor], channels: int, divisor: int = 1) -> Tensor:
    """The sum of readings `[..., channels]`, divided; values for later layers behind them come side by side."""
    has_values = readings[0].shape[-1] > channels
    total = reduce(torch.add, [reading[..., :channels] if has_values else reading for reading in readings])
    total = total if divisor == 1 else total / divisor
    if not has_values:
        return total
    return torch.cat((total, *(reading[..., channels:] for reading in readings)), dim=-1)


def count_weights(layers: Iterable[nn.Linear]) -> int:
    """The number of weights, without biases."""
    return sum(layer.in_features * layer.out_features for layer in layers)


Found = TypeVar("Found")


def required(state: Found | None) -> Found:
    """Return a state that cannot be None here: operations return None only if no state was requested."""
    assert state is not None
    return state


def activation_dtype(layer: nn.Module, device: torch.device) -> torch.dtype:
    """The dtype that a layer computes on a device: autocast's, or else the type of its weights."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next((weight.dtype for weight in layer.parameters() if weight.is_floating_point()), torch.float32)


def memory_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of a recurrent memory for inputs of `dtype`: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
