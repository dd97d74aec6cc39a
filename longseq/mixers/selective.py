"""The layer that Mamba and Longhorn share: expand, convolve, scan with input-dependent rates, gate."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.linear import AlignedLinear, project_pair
from longseq.blocks.pairs import stack_pair
from longseq.kernels import silu_product
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.states import ConvolvedState


class SelectiveMixer(Mixer[ConvolvedState]):
    """Base of Mamba and Longhorn; a subclass supplies the recurrence.

        x, z = in_proj(u);  x = SiLU(conv(x));  r, k, q = x_proj(x)
        y = out_proj((recurrence(x, rate_proj(r), k, q) + D x) SiLU(z))

    I = expand · d_model channels run through the recurrence; r has `rate_rank` entries, k and q have `state_size`.

    Source: Mamba (Gu and Dao, 2023), figure 3; Longhorn (Liu et al., 2024), section 3, keeps the block.
    """

    no_weight_decay_names: ClassVar[tuple[str, ...]] = ("D",)
    reads_backwards: ClassVar[bool] = True
    reads_pairs: ClassVar[bool] = True
    # For each entry of the state and each token: the decay, the input, the update and the readout take two each.
    flops_per_entry: ClassVar[int] = 8

    def __init__(
        self,
        d_model: int,
        *,
        expand: int = 2,
        state_size: int = 16,
        convolution_width: int = 4,
        rate_rank: int | None = None,
        rates: int | None = None,
        rate_bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.inner = expand * d_model
        self.state_size = state_size
        self.rate_rank = math.ceil(d_model / 16) if rate_rank is None else rate_rank
        self.in_proj = nn.Linear(d_model, 2 * self.inner, bias=False)
        self.convolution = ShortConvolution(self.inner, convolution_width, bias=True, backend=backend)
        self.x_proj = AlignedLinear(self.inner, self.rate_rank + 2 * state_size, bias=False)
        self.rate_proj = nn.Linear(self.rate_rank, self.inner if rates is None else rates, bias=rate_bias)
        self.D = nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, d_model, bias=False)

    def reset_parameters(self) -> None:
        """Set the skip D to one."""
        nn.init.ones_(self.D)

    def recur(
        self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Run `x [B, T, I]`, `rate [B, T, R]`, `key, query [B, T, N]`: `[B, T, I]`, and the last memory if wanted."""
        raise NotImplementedError

    def recur_pair(
        self, backward: Self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, options: ScanOptions
    ) -> Tensor:
        """Run the recurrence over rows `[2 B, ...]`: the first half forward by this mixer, the second backward by
        `backward`.

        The default is for recurrences without parameters.
        """
        return self.recur(x, rate, key, query, None, options)[0]

    def recur_step(self, x: Tensor, rate: Tensor, key: Tensor, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Run the recurrence over one token; the shapes are those of `recur` without T."""
        raise NotImplementedError

    def scan(
        self, projected: Tensor, state: ConvolvedState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, ConvolvedState | None]:
        convolution, memory = (None, None) if state is None else state
        x, gate = projected.chunk(2, dim=-1)
        x, convolution = self.convolution(x, convolution, **options._asdict())
        y, memory = self.recur(x, *self._selection(x), memory, options)
        last = ConvolvedState(required(convolution), required(memory)) if options.output_final_state else None
        return self._gate(y, x, gate, self.D), last

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        x, gate = projected.chunk(2, dim=-1)
        x = self.convolution.convolve_pair(backward.convolution, x, mask)
        rank, key, query = self._split(project_pair(self.x_proj, backward.x_proj, x))
        rate = project_pair(self.rate_proj, backward.rate_proj, rank)
        y = self.recur_pair(backward, x, rate, key, query, ScanOptions.of_pair(mask))
        return self._gate(y, x, gate, stack_pair(self.D, backward.D))

    def scan_step(self, projected: Tensor, state: ConvolvedState) -> tuple[Tensor, ConvolvedState]:
        x, gate = projected.chunk(2, dim=-1)
        x, convolution = self.convolution.step(x, required(state.convolution))
        y, memory = self.recur_step(x, *self._selection(x), state.memory)
        return self._gate(y, x, gate, self.D), ConvolvedState(convolution, memory)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of one sequence's recurrent memory."""
        return self.inner, self.state_size

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> ConvolvedState:
        memory = torch.zeros(batch, *self.memory_shape, device=device, dtype=memory_dtype(dtype))
        return ConvolvedState(self.convolution.initial_state(batch, device, memory.dtype), memory)

    def _selection(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank, key, query = self._split(self.x_proj(x))
        return self.rate_proj(rank), key, query

    def _split(self, selected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank, key, query = selected.split([self.rate_rank, self.state_size, self.state_size], dim=-1)
        return rank, key, query

    def _gate(self, y: Tensor, x: Tensor, gate: Tensor, D: Tensor) -> Tensor:
        return silu_product(y, gate, skip=x, skip_weight=D, backend=self.local_backend)

    def scan_flops(self, tokens: int) -> int:
        # The skip and the gate take two operations a channel each.
        return tokens * self.inner * (self.flops_per_entry * self.state_size + 4)
