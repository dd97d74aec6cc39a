"""Griffin's recurrent block: a short convolution and a gated linear recurrent unit."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.pairs import stack_pair
from longseq.blocks.precision import at_least_float32
from longseq.kernels import linear_attention, linear_attention_step
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.states import ConvolvedState

DECAY_EXPONENT = 8.0
TAP_DEVIATION = 0.1  # the standard deviation of the sum of the initial taps


@register("rg_lru")
class RGLRU(Mixer[ConvolvedState]):
    """A real-gated linear recurrent unit between two branches.

        x, z = W_in u;   x = conv(x);   r, i = sigmoid(W_a x + b_a), sigmoid(W_x x + b_x)
        log a = −8 softplus(Λ) r;   h ← a h + sqrt(1 − a²) (i x);   y = W_out (h GELU(z))

    I channels run through the recurrence, each with a memory of one number. W_a and W_x have a block for each head. As
    in the published code, GELU is approximated by tanh, and the taps start with the standard deviation 0.1 /
    sqrt(convolution_width). As in the paper, W_a and W_x start with 1 / sqrt(width of a block) (transformers'
    RecurrentGemma: a tenth of it), and for r = 1, a starts uniformly between 0.9 and 0.999. In the published code
    a^(1/8) does, and the first token of a sequence is not multiplied by the root.

    Args:
        width: I; by default the multiple of num_heads that is nearest to 4/3 d_model.
        num_heads: the number of blocks of W_a and W_x.
        convolution_width: taps of the short convolution.

    Source: Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models (De et al.,
    2024), sections 2.3 and 2.4, equations 1 to 4; the sign of Λ as in its appendix A.
    """

    paper = "Griffin (arXiv:2402.19427), section 2.4"
    operations = ("short_convolution", "linear_attention")
    reads_backwards = True
    reads_pairs = True
    no_weight_decay_names = ("decay", "gate_bias")

    def __init__(
        self,
        d_model: int,
        *,
        width: int | None = None,
        num_heads: int = 16,
        convolution_width: int = 4,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.width = num_heads * max(1, round(4 * d_model / (3 * num_heads))) if width is None else width
        self.num_heads, self.head_dim = choose_heads(self.width, num_heads, None, preferred=1)
        self.in_proj = nn.Linear(d_model, 2 * self.width)
        self.convolution = ShortConvolution(self.width, convolution_width, activation=None, bias=True, backend=backend)
        # Λ, and the weights of both gates: the first half of a block's outputs is r, the second half i.
        self.decay = nn.Parameter(torch.empty(self.width))
        self.gate_weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim, 2 * self.head_dim))
        self.gate_bias = nn.Parameter(torch.empty(self.num_heads, 2 * self.head_dim))
        self.out_proj = nn.Linear(self.width, d_model)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        decay = torch.empty_like(self.decay).uniform_(0.9, 0.999)
        self.decay.copy_(torch.expm1(-decay.log() / DECAY_EXPONENT).log())  # the inverse of softplus
        self.convolution.weight.normal_(std=TAP_DEVIATION * self.convolution.width**-0.5)
        assert self.convolution.bias is not None
        self.convolution.bias.zero_()
        self.gate_weight.normal_(std=self.head_dim**-0.5)
        self.gate_bias.zero_()

    def scan(
        self, projected: Tensor, state: ConvolvedState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, ConvolvedState | None]:
        convolution, memory = (None, None) if state is None else state
        x, branch = projected.chunk(2, dim=-1)
        x, convolution = self.convolution(x, convolution, **options._asdict())
        gates = self._gates(x, self.gate_weight, self.gate_bias)
        h, memory = self._recur(*self._recurrence(x, gates, self.decay), memory, options)
        last = ConvolvedState(required(convolution), required(memory)) if options.output_final_state else None
        return self._gate(h, branch), last

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        x, branch = projected.chunk(2, dim=-1)
        x = self.convolution.convolve_pair(backward.convolution, x, mask).unflatten(0, (2, -1))
        weight, bias, decay = (
            stack_pair(self.gate_weight, backward.gate_weight),
            stack_pair(self.gate_bias, backward.gate_bias),
            stack_pair(self.decay, backward.decay),
        )
        gates = self._gates(x, weight, bias[:, None, None])
        decay, update = (y.flatten(0, 1) for y in self._recurrence(x, gates, decay[:, None, None]))
        h, _ = self._recur(decay, update, None, ScanOptions.of_pair(mask))
        return self._gate(h.unflatten(0, (2, -1)).sum(0), branch)

    def _recur(
        self, decay: Tensor, update: Tensor, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        """The recurrence: h `[B, T, H, I / H]` and the last memory."""
        if options.mask is not None:
            decay, update = (x * options.mask[..., None, None] for x in (decay, update))
        # Two tensors: torch.compile refuses one tensor for two arguments.
        query, key = (torch.ones_like(update[..., :1]) for _ in range(2))
        return linear_attention(query, key, update, g_value=decay, initial_state=memory, **self.call_options(options))

    def scan_step(self, projected: Tensor, state: ConvolvedState) -> tuple[Tensor, ConvolvedState]:
        x, branch = projected.chunk(2, dim=-1)
        x, convolution = self.convolution.step(x, required(state.convolution))
        decay, update = self._recurrence(x, self._gates(x, self.gate_weight, self.gate_bias), self.decay)
        one = torch.ones_like(update[..., :1])
        h, memory = linear_attention_step(one, one, update, state.memory, g_value=decay, backend=self.step_backend)
        return self._gate(h, branch), ConvolvedState(convolution, memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> ConvolvedState:
        dtype = memory_dtype(dtype)
        memory = torch.zeros(batch, self.num_heads, 1, self.head_dim, device=device, dtype=dtype)
        return ConvolvedState(self.convolution.initial_state(batch, device, dtype), memory)

    def _gates(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """r and i, concatenated: `[..., H, 2 I / H]`. For a pair, x is `[2, B, T, I]` and the weight `[2, H, ...]`."""
        product = "...hi,hij->...hj" if weight.dim() == 3 else "pbthi,phij->pbthj"
        gates = torch.einsum(product, self._heads(x), weight.to(x.dtype))
        return (at_least_float32(gates) + bias).sigmoid()

    def _recurrence(self, x: Tensor, gates: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """log a and sqrt(1 − a²) (i x), both `[..., H, I / H]`."""
        recurrence, entry = gates.chunk(2, dim=-1)
        decay = -DECAY_EXPONENT * self._heads(functional.softplus(at_least_float32(decay))) * recurrence
        return decay, sqrt_one_minus_square(decay) * entry * at_least_float32(self._heads(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _gate(self, h: Tensor, branch: Tensor) -> Tensor:
        return h.flatten(-2).to(branch.dtype) * functional.gelu(branch, approximate="tanh")

    def scan_flops(self, tokens: int) -> int:
        gates = 2 * self.gate_weight.numel()
        recurrence = 3 * self.width  # the decay, the update and their sum
        return tokens * (gates + recurrence + self.width)


def sqrt_one_minus_square(log_a: Tensor) -> Tensor:
    """sqrt(1 − a²) from log a <= 0, precise for a near 1, with a finite gradient at a = 1."""
    return (-torch.expm1(2 * log_a)).clamp_min(torch.finfo(log_a.dtype).tiny).sqrt()
