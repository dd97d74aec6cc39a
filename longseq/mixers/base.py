"""The contract of a token mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn
from typing_extensions import Self

from longseq.arguments import KeepsArguments
from longseq.blocks.positions import Layout
from longseq.blocks.reading import BACKWARD, FORWARD
from longseq.blocks.recompute import checkpoint_if
from longseq.blocks.sharding import gathers_parameters
from longseq.kernels.checks import check_mask
from longseq.kernels.dispatch import backend_of_local, backend_of_step, is_exporting
from longseq.kernels.packing import Packing, pack_like
from longseq.kernels.reading import Reverse
from longseq.state import StateT, map_state


class Mixer(KeepsArguments, nn.Module, Generic[StateT]):
    """A layer that mixes information along a sequence: project in, scan, project out.

        y, state = mixer(x, state)              x, y [B, T, d_model]
        y_t, state = mixer.step(x_t, state)     x_t, y_t [B, d_model]

    A mixer is the reading of one direction (see `longseq.blocks.reading.Reading`). `StateT` is the type of its state, a
    named tuple.

    `in_proj` and `out_proj` act on each token alone. Everything that looks along the sequence happens between them, in
    `scan`: convolution, gates that follow it, recurrence, output norm. The split lets two directions over an image
    share their projections.

    A subclass creates the two projections and defines `scan`, `scan_step`, `initial_state` and `scan_flops`. A whole
    sequence, any split of it with the state carried over, and token-by-token steps must give the same numbers. A mixer
    that looks back before it projects sets `in_proj` to None and overrides `project_in` to return the tokens unchanged.

    Class attributes:
        paper: the source of the layer.
        operations: names of the `longseq.kernels` operations over sequences that `scan` calls.
        no_weight_decay_names: names of parameters that weight decay must leave alone (see `longseq.parameters`).
        supports_noncausal: the constructor takes `causal=False`, with which one pass sees all tokens.
        reads_backwards: `scan` takes `reverse`. With True it reads from the last token to the first, without a copy of
            the tokens in that order; the given state is then the one behind the last token. With "second_half" it
            reads the second half of the rows of the batch so.
        reads_pairs: it defines `scan_pair`, which reads the same tokens both ways.
        growing_state: the state keeps all tokens, in their own type. False: its size does not depend on the number of
            tokens, and its floating-point tensors are float32 (float64 for float64 inputs).
        recomputable: `recompute` saves memory. False where `scan` keeps little more than its arguments.

    Attributes:
        arguments: those of the constructor, with which a saved model builds the mixer again (see `KeepsArguments`).
        revision: a number for the function that the layer computes from its weights. It goes up with every change of
            that function, and checkpoints of an earlier revision are refused (see `check_revisions`).
        reverse: set by models: the layer reads from the last token to the first. A state is then the one behind the
            last token or that at the first, and `step` reads the token before.
        recompute: set by models: the backward pass runs `scan` again, instead of keeping what lies between the
            projections.
    """

    paper: ClassVar[str] = ""
    operations: ClassVar[tuple[str, ...]] = ()
    no_weight_decay_names: ClassVar[tuple[str, ...]] = ()
    supports_noncausal: ClassVar[bool] = False
    reads_backwards: ClassVar[bool] = False
    reads_pairs: ClassVar[bool] = False
    growing_state: ClassVar[bool] = False
    recomputable: ClassVar[bool] = True

    revision: int = 1
    reverse: bool = False
    recompute: bool = False

    # What the last scan reported while it was watched: a callback puts a dictionary here (see `observe`).
    observed: dict[str, Tensor] | None = None

    in_proj: nn.Linear | None
    out_proj: nn.Linear | None

    def __init__(self, d_model: int, *, backend: str = "auto") -> None:
        super().__init__()
        if d_model < 1:
            raise ValueError(f"d_model={d_model}: a mixer needs at least one channel")
        self.d_model = d_model
        self.backend = backend

    @property
    def orders(self) -> tuple[str, ...]:
        """The one order in which this layer reads."""
        return (BACKWARD if self.reverse else FORWARD,)

    @property
    def readers(self) -> list[Self]:
        """The mixer of each order: this one."""
        return [self]

    def forward(
        self,
        x: Tensor,
        state: StateT | None = None,
        *,
        layout: Layout | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, StateT | None]:
        """Mix a batch of sequences.

        Args:
            x: `[B, T, d_model]`.
            state: what an earlier call returned, or None at the start of a sequence.
            layout: where the patches of an image stand; a mixer reads tokens as they come and does not ask.
            cu_seqlens: `[N + 1]` integers, the borders of N sequences packed into one row (B = 1), or their `Packing`;
                the state then has N rows.
            mask: `[B, T]`, True at real tokens, of sequences that are not packed. Padding leaves the state alone; its
                outputs are not defined.
            output_final_state: False where nobody reads the state, which then is not computed.

        Returns:
            `y [B, T, d_model]` and the state after the last real token, or None.

        Raises:
            ValueError: `cu_seqlens` or `mask` does not fit `x`, or both are given.
        """
        packing = check_rows(x, cu_seqlens, mask)
        y, state = self.read(
            self.project_in(x),
            state,
            reverse=self.reverse,
            cu_seqlens=packing,
            mask=mask,
            output_final_state=output_final_state,
        )
        return self.project_out(y), state

    def read(
        self,
        projected: Tensor,
        state: StateT | None = None,
        *,
        reverse: Reverse = False,
        cu_seqlens: Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, StateT | None]:
        """`scan` in either direction, with activation checkpointing where the model wants to `recompute`.

        With `reverse` each sequence is read from its last token; `reverse="second_half"` is for mixers that read
        backwards alone. A mixer that does not read backwards gets the tokens turned round in memory.
        """
        turned = bool(reverse) and not self.reads_backwards
        options: dict[str, Any] = {"reverse": reverse} if self.reads_backwards else {}
        if turned:
            assert reverse is True
            projected, mask = projected.flip(1), None if mask is None else mask.flip(1)
            if cu_seqlens is not None:  # the last sequence comes first, and so does its state
                cu_seqlens, state = cu_seqlens.turned(), map_state(_flip_rows, state)
        packing = cu_seqlens
        options |= {"cu_seqlens": packing, "mask": mask, "output_final_state": output_final_state}
        y, last = checkpoint_if(self.recompute and self.recomputable, self.scan, projected, state, **options)
        if turned:
            y, last = y.flip(1), last if packing is None else map_state(_flip_rows, last)
        return y, last

    def read_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        """`scan_pair`, with activation checkpointing where the model wants to `recompute`."""
        return checkpoint_if(self.recompute and self.recomputable, self.scan_pair, backward, projected, mask)

    @gathers_parameters
    def step(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Mix one more token: `x [B, d_model]` and the state before it give `y [B, d_model]` and the state after it."""
        y, state = self.scan_step(self.project_in(x), state)
        return self.project_out(y), state

    @property
    def step_backend(self) -> str:
        """The backend that the operations' one-token forms are asked for."""
        return backend_of_step(self.backend)

    @property
    def local_backend(self) -> str:
        """The backend of the operations on each token alone."""
        return backend_of_local(self.backend)

    def project_in(self, x: Tensor) -> Tensor:
        """Project tokens `[..., d_model]` to what `scan` reads `[..., P]`, each token alone."""
        assert self.in_proj is not None, "this copy only scans: its projections belong to another mixer"
        return self.in_proj(x)

    def project_out(self, y: Tensor) -> Tensor:
        """Project what `scan` gives `[..., I]` back to tokens `[..., d_model]`, each token alone."""
        assert self.out_proj is not None, "this copy only scans: its projections belong to another mixer"
        return self.out_proj(y)

    def scan(
        self,
        projected: Tensor,
        state: StateT | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, StateT | None]:
        """Scan projected tokens `[B, T, P]` along the sequence; returns `[B, T, I]`, and the state if it is wanted."""
        raise NotImplementedError

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the sum of two scans: by this mixer from the first token on, and by `backward` from the last token on.

        `backward` has the same class and options, and may be this mixer itself. Each operation over sequences is called
        once for both: the second half of its rows is read from the end. The parts of both mixers are not called; only
        their parameters are used. `Directions` therefore does not call this method where a part has hooks or was
        replaced, where a callback watches (see `observe`), or for packed rows, which operations read in one direction.
        """
        raise NotImplementedError

    def scan_step(self, projected: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Scan one projected token `[B, P]`; returns `[B, I]` and the state."""
        raise NotImplementedError

    def needs_state(self, wanted: bool) -> bool:
        """True if a scan must compute its last state: the caller wants it, or a callback watches the layer."""
        return wanted or self.observed is not None

    def observe(self, name: str, measure: Callable[[], Tensor]) -> None:
        """Report a number about the scan, such as the norm of its state. It costs nothing unless a callback watches.

        `measure` returns a scalar. Of several reports under one name in one scan the last one is kept.
        """
        if self.observed is not None:
            with torch.no_grad():
                self.observed[name] = measure().detach().float()

    def initial_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> StateT:
        """Return the state before the first token: a typed tuple of tensors `[batch, ...]`.

        `dtype` is that of the inputs; recurrent memories are float32 whatever it is (float64 for float64).
        """
        raise NotImplementedError

    def scan_flops(self, tokens: int) -> int:
        """Count the floating-point operations of `scan` over one sequence, the recurrence in its one-token form."""
        raise NotImplementedError

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations of a forward pass over one sequence; a multiply-add counts as two."""
        projections = sum(p.in_features * p.out_features for p in (self.in_proj, self.out_proj) if p is not None)
        return 2 * tokens * projections + self.scan_flops(tokens)

    def reset_parameters(self) -> None:
        """Set the initial values of the mixer's own parameters and buffers, and of the weights of its parts that begin
        with other values than the parts choose. It is called after the `reset_parameters` of the parts.
        """

    def release_projections(self) -> None:
        """Keep only the scan, for a mixer that shares another one's projections."""
        self.in_proj = None
        self.out_proj = None


# Operations choose their backend by looking at tensors, which a symbolic trace does not have. Called, not put as a
# decorator: timm declares that it returns nn.Module, and type checkers would not know the class any more.
register_notrace_module(Mixer)


def check_rows(x: Tensor, cu_seqlens: Tensor | Packing | None, mask: Tensor | None) -> Packing | None:
    """Return the packing of tokens `x [B, T, ...]`; raise ValueError where it or the mask does not fit them."""
    if cu_seqlens is not None and mask is not None:
        raise ValueError("mask and cu_seqlens are both given; packed sequences have no padding, leave the mask out")
    if mask is not None and not is_exporting():
        check_mask("mixer", mask, "x", x)
    return pack_like(cu_seqlens, x)


def _flip_rows(x: Tensor) -> Tensor:
    return x.flip(0)


Found = TypeVar("Found")


def required(state: Found | None) -> Found:
    """The state that an operation was asked for; it returns None only where nobody asked."""
    assert state is not None
    return state


def memory_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of a recurrent memory for inputs of `dtype`: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
