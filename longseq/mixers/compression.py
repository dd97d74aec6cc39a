"""The layer that Lattice and TTT share: queries and keys from one projection, a memory of slots, a gated output."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.linear import AlignedLinear
from longseq.blocks.pairs import repeat_rows, stack_pair
from longseq.blocks.precision import at_least_float32
from longseq.kernels import orthogonal_recurrence, orthogonal_recurrence_step
from longseq.kernels.reading import Reverse
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.states import ConvolvedState

GAMMA_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": functional.softplus}
FORGET_BIAS = 4.0  # μ starts at 0.98


def padding_last(mask: Tensor, reverse: Reverse) -> Tensor:
    """The indices `[B, T, 1]` that sort tokens so that padding is read last, for a mask `[B, T]`."""
    backward = torch.zeros_like(mask[:, :1])
    backward[mask.shape[0] // 2 if reverse == "second_half" else 0 :] = bool(reverse)
    return (mask == backward).byte().argsort(dim=1, stable=True).unsqueeze(-1)


class CompressionMixer(Mixer[ConvolvedState]):
    """Base of Lattice and TTT; `recurrence`, options of the operation, defines how a subclass updates the memory.

        z, v, w, γ, μ = W x;   q, k = conv_q(z), conv_k(z);   y = W_o (memory(q, k, v, γ, μ) ⊙ GELU(w))

    The convolutions have no activation: the paper names none, and the code of TTT has none. The memory of a head is
    `[D, M]` with D = head_dim. It starts with random orthonormal columns, drawn once for each head, saved, and not
    trained. γ is one number for each head, and so is μ if there is a forget gate.

    Source: Lattice (Karami and Mirrokni, 2025), appendix A and figure 2, after the block of Mamba.
    """

    operations: ClassVar[tuple[str, ...]] = ("short_convolution", "orthogonal_recurrence")
    reads_backwards = True
    reads_pairs = True

    slots: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        recurrence: dict[str, Any],
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_slots: int | None = None,
        convolution_width: int = 4,
        gamma_activation: str = "sigmoid",
        forget_gate: bool = True,
        chunk_size: int = 1,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=64)
        self.num_slots = self.head_dim if num_slots is None else num_slots
        self.gamma_activation = gamma_activation
        self.forget_gate = forget_gate
        self.recurrence = recurrence
        self.chunk_size = chunk_size
        self.widths = [self.num_heads * self.num_slots, d_model, d_model, self.num_heads * (1 + forget_gate)]
        self.in_proj = AlignedLinear(d_model, sum(self.widths), bias=False)
        self.query_convolution, self.key_convolution = (
            ShortConvolution(self.widths[0], convolution_width, activation=None, backend=backend) for _ in range(2)
        )
        self.forget_bias = nn.Parameter(torch.empty(self.num_heads)) if forget_gate else None
        self.register_buffer("slots", torch.empty(self.num_heads, self.head_dim, self.num_slots))
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    @property
    def piece_multiple(self) -> int:  # type: ignore[override]
        return self.chunk_size

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.forget_bias is not None:
            self.forget_bias.fill_(FORGET_BIAS)
        # The decomposition has no half precision, which may be the default type.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        random = torch.randn(self.slots.shape, dtype=dtype, device=self.slots.device)
        self.slots.copy_(torch.linalg.qr(random).Q)

    def scan(
        self, projected: Tensor, state: ConvolvedState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, ConvolvedState | None]:
        packing = options.cu_seqlens
        rows = projected.shape[0] if packing is None else packing.count
        convolution, memory = (None, self._first_memory(rows, projected.dtype)) if state is None else state
        shared, v, gate, rates = self._split(projected)
        q, last = self.query_convolution(shared, convolution, **options._asdict())
        k, _ = self.key_convolution(shared, convolution, **options._replace(output_final_state=False)._asdict())
        gamma, g = self._gamma(rates), self._log_decay(rates)
        o, final = self._recur(q, k, v, gamma, g, memory, options)
        y = o.flatten(-2) * functional.gelu(gate)
        return y, ConvolvedState(required(last), required(final)) if options.output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        shared, v, gate, rates = self._split(projected)
        q = self.query_convolution.convolve_pair(backward.query_convolution, shared, mask)
        k = self.key_convolution.convolve_pair(backward.key_convolution, shared, mask)
        gamma, g = repeat_rows(self._gamma(rates)), self._log_decay_pair(backward, rates)
        memory = torch.cat([mixer._first_memory(projected.shape[0], projected.dtype) for mixer in (self, backward)])
        o, _ = self._recur(q, k, repeat_rows(v), gamma, g, memory, ScanOptions.of_pair(mask))
        return o.unflatten(0, (2, -1)).sum(0).flatten(-2) * functional.gelu(gate)

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor | None, memory: Tensor, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        """The memory read at the queries, `[B, T, H, D]`, and the last memory."""
        mask, order = options.mask, None
        if mask is not None:
            gamma, g = gamma * mask.unsqueeze(-1), None if g is None else g * mask.unsqueeze(-1)
            if self.chunk_size > 1:  # chunks hold the tokens that they would hold without padding
                order = padding_last(mask, options.reverse)
                q, k, v, gamma = (torch.take_along_dim(x, order, 1) for x in (q, k, v, gamma))
                g = None if g is None else torch.take_along_dim(g, order, 1)
        q, k, v = self._to_heads(q), self._to_keys(k), self._to_heads(v)
        call = {**self.recurrence, **self.call_options(options), "chunk_size": self.chunk_size}
        o, final = orthogonal_recurrence(q, k, v, gamma, g=g, initial_state=memory, **call)
        if order is not None:
            o = torch.take_along_dim(o, order.argsort(1).unsqueeze(-1), 1)
        return o, final

    def scan_step(self, projected: Tensor, state: ConvolvedState) -> tuple[Tensor, ConvolvedState]:
        shared, v, gate, rates = self._split(projected)
        gamma, g = self._gamma(rates), self._log_decay(rates)
        q, last = self.query_convolution.step(shared, required(state.convolution))
        k, _ = self.key_convolution.step(shared, required(state.convolution))
        q, k, v = self._to_heads(q), self._to_keys(k), self._to_heads(v)
        options = {**self.recurrence, "backend": self.step_backend}
        o, memory = orthogonal_recurrence_step(q, k, v, gamma, state.memory, g=g, **options)
        return o.flatten(-2) * functional.gelu(gate), ConvolvedState(last, memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> ConvolvedState:
        memory = self._first_memory(batch, dtype).to(device)
        return ConvolvedState(self.query_convolution.initial_state(batch, memory.device, memory.dtype), memory)

    def _first_memory(self, batch: int, dtype: torch.dtype | None) -> Tensor:
        return self.slots.to(memory_dtype(dtype)).expand(batch, -1, -1, -1)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The input of queries and keys, the values, the output gate, and the logits of γ and μ `[..., H or 2 H]`."""
        shared, v, gate, rates = projected.split(self.widths, dim=-1)
        return shared, v, gate, at_least_float32(rates)

    def _gamma(self, rates: Tensor) -> Tensor:
        return GAMMA_ACTIVATIONS[self.gamma_activation](rates[..., : self.num_heads])

    def _log_decay(self, rates: Tensor) -> Tensor | None:
        """log μ `[..., H]`; None without a forget gate."""
        if self.forget_bias is None:
            return None
        return functional.logsigmoid(rates[..., self.num_heads :] + self.forget_bias)

    def _log_decay_pair(self, backward: Self, rates: Tensor) -> Tensor | None:
        """log μ `[2 B, T, H]` for this mixer and `backward`; None without a forget gate."""
        bias = stack_pair(self.forget_bias, backward.forget_bias)
        if bias is None:
            return None
        return functional.logsigmoid(rates[..., self.num_heads :] + bias[:, None, None]).flatten(0, 1)

    def _to_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def _to_keys(self, k: Tensor) -> Tensor:
        return self._to_heads(k)
