"""Variational linear attention: a delta rule whose write key avoids the directions of earlier keys."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from longseq.blocks.convolution import ShortConvolution
from longseq.blocks.pairs import repeat_rows
from longseq.kernels import map_features, variational_linear_attention, variational_linear_attention_step
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register


class VLAState(NamedTuple):
    """The state of one layer.

    convolution: the last inputs `[B, 3 d_model, W - 1]` (None without convolution)
    memory: S `[B, H, K, K]`
    inverse: A `[B, H, K, K]`, the inverse of λ0 I + Σ u uᵀ
    key_sum: z `[B, H, K]`
    steps: the number of tokens so far `[B]`, int64, which determines when a refresh is due
    """

    convolution: Tensor | None
    memory: Tensor
    inverse: Tensor
    key_sum: Tensor
    steps: Tensor


@register("vla")
class VLA(Mixer[VLAState]):
    """Multi-head variational linear attention with φ = ELU + 1.

        q, k, v = W x;   k̂ = φ(k) / ‖φ(k)‖;   u = W_u k / (‖W_u k‖ √K)
        A ← A − (A u)(A u)ᵀ / (1 + uᵀ A u);   A ← A + refresh I every `refresh_period` tokens
        α̂ = A k̂ / ‖A k̂‖;   S ← S + α̂ (v − Sᵀ k̂)ᵀ;   z ← z + φ(k);   y = W_o (Sᵀ φ(q) / max(zᵀ φ(q), eps))

    A starts as I / λ0, and each head has its own W_u `[K, K]`. The norm of W_u k has 1e-6 under its root, as in the
    delta rule; the paper has no such number. The paper has no convolution and no positions; use a convolution of width
    4 to compare with layers that have one.

    The eigenvalues of the transition I − α̂ k̂ᵀ are at most one in magnitude, but its spectral norm exceeds one unless
    α̂ = k̂ (see `variational_linear_attention`). Gradients can grow along the recurrence, contrary to the paper's
    Corollary 1.

    Args:
        num_heads, head_dim: give at most one; by default heads of 32 channels, as in the paper.
        convolution_width: taps of a short convolution on q, k and v; 0 leaves it out.
        lambda0: λ0, the weight of the identity before the first token. Without updates of A it only counts if
            `normalize_alpha` is False.
        refresh_period, refresh: the number of tokens between refreshes (0 or None: no refresh), and the multiple of the
            identity that a refresh adds to A.
        eps: the least denominator.
        scale_penalty: the 1 / √K of u, as in Algorithm 1, line 10; False for unit u, as in equation 8.
        update_penalty: False keeps A at I / λ0 and has no W_u: the delta rule with β = 1 (an ablation).
        normalize_key, normalize_alpha: the divisions by ‖φ(k)‖ and ‖A k̂‖ (ablations). Without them the memory is
            unstable, as the paper reports of its second version.
        normalizer: the division by zᵀ φ(q), by which the output shrinks as 1 / t (an ablation). In the paper's recall
            task, VLA fails with it above 8 pairs: for 16 pairs the accuracy is 0.10, and 0.90 without it. A small
            language model of bytes has a loss of 2.26 nats with it and 1.95 without (benchmarks/README.md).

    Source: Variational Linear Attention (Pandey and Singh, 2026), Algorithm 1.
    """

    paper = "VLA (arXiv:2605.11196), Algorithm 1"
    operations = ("short_convolution", "variational_linear_attention")
    reads_backwards = True
    reads_pairs = True

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        convolution_width: int = 0,
        lambda0: float = 0.1,
        refresh_period: int | None = 20,
        refresh: float = 1e-3,
        eps: float = 1e-4,
        scale_penalty: bool = True,
        update_penalty: bool = True,
        normalize_key: bool = True,
        normalize_alpha: bool = True,
        normalizer: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=32)
        self.lambda0 = lambda0
        self.refresh_period = refresh_period
        self.refresh = refresh
        self.eps = eps
        self.scale_penalty = scale_penalty
        self.normalize_key = normalize_key
        self.normalize_alpha = normalize_alpha
        self.normalizer = normalizer
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.convolution = ShortConvolution.of_width(3 * d_model, convolution_width, backend)
        shape = (self.num_heads, self.head_dim, self.head_dim)
        self.penalty = nn.Parameter(torch.empty(shape)) if update_penalty else None
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W_u as `nn.Linear` draws its weight."""
        if self.penalty is not None:
            bound = 1 / math.sqrt(self.head_dim)
            self.penalty.uniform_(-bound, bound)

    def scan(
        self, projected: Tensor, state: VLAState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, VLAState | None]:
        convolution = None if state is None else state.convolution
        if self.convolution is not None:
            projected, convolution = self.convolution(projected, convolution, **options._asdict())
        q, k, v, u = self._features(projected)
        call = {**self._options, **self.call_options(options), "mask": options.mask}
        earlier = None if state is None else state[1:]
        o, memory = variational_linear_attention(q, k, v, u, lambda0=self.lambda0, initial_state=earlier, **call)
        return o.flatten(-2), VLAState(convolution, *required(memory)) if options.output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.convolution is None:
            q, k, v, u = self._features(projected, backward)
            q, k, v = repeat_rows(q), repeat_rows(k), repeat_rows(v)
        else:
            both = self.convolution.convolve_pair(required(backward.convolution), projected, mask)
            q, k, v, u = self._features(both.unflatten(0, (2, -1)), backward)
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        u = None if u is None else u.flatten(0, 1)
        options = {**self._options, "mask": repeat_rows(mask), "reverse": "second_half", "backend": self.backend}
        o, _ = variational_linear_attention(q, k, v, u, lambda0=self.lambda0, **options)
        return o.unflatten(0, (2, -1)).sum(0).flatten(-2)

    def scan_step(self, projected: Tensor, state: VLAState) -> tuple[Tensor, VLAState]:
        convolution = state.convolution
        if self.convolution is not None:
            projected, convolution = self.convolution.step(projected, required(convolution))
        options = {**self._options, "backend": self.step_backend}
        o, memory = variational_linear_attention_step(*self._features(projected), state=state[1:], **options)
        return o.flatten(-2), VLAState(convolution, *memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> VLAState:
        dtype = memory_dtype(dtype)
        shape = (batch, self.num_heads, self.head_dim, self.head_dim)
        memory = torch.zeros(shape, device=device, dtype=dtype)
        inverse = torch.eye(self.head_dim, device=device, dtype=dtype).expand(shape) / self.lambda0
        steps = torch.zeros(batch, device=device, dtype=torch.int64)
        convolution = None if self.convolution is None else self.convolution.initial_state(batch, device, dtype)
        return VLAState(convolution, memory, inverse, torch.zeros_like(memory[..., 0]), steps)

    @property
    def _options(self) -> dict[str, Any]:
        """The options of the operation, for sequences and for one token."""
        names = ("refresh_period", "refresh", "eps", "normalize_key", "normalize_alpha", "normalizer")
        return {name: getattr(self, name) for name in names}

    def _features(
        self, projected: Tensor, backward: Self | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """φ(q), φ(k), v and u of the projected tokens, `[..., H, K]`.

        For a pair, the tokens are `[B, T, ...]` or `[2, B, T, ...]`, and u is `[2, B, T, H, K]`.
        """
        q, k, v = projected.unflatten(-1, (3 * self.num_heads, self.head_dim)).chunk(3, dim=-2)
        options: dict[str, Any] = {"dtype": torch.promote_types(k.dtype, torch.float32), "backend": self.local_backend}
        u = None
        if self.penalty is not None:
            if backward is None:
                u = self._direct(k)
            else:
                ahead, behind = k.unbind() if k.dim() == 5 else (k, k)
                u = torch.stack((self._direct(ahead), backward._direct(behind)))
            scale = 1 / math.sqrt(self.head_dim) if self.scale_penalty else 1.0
            u = map_features(u, norm="l2", scale=scale, **options)
        q, k = (map_features(x, feature_map="elu_plus_one", **options) for x in (q, k))
        return q, k, v, u

    def _direct(self, k: Tensor) -> Tensor:
        """W_u k, `[..., H, K]`."""
        return torch.einsum("...hk,hjk->...hj", k, required(self.penalty).to(k.dtype))

    def scan_flops(self, tokens: int) -> int:
        # Reading at k̂, writing at α̂ and reading at q take 2 K V each, and the product A k̂ takes 2 K². W_u k, A u and
        # the update of A take 2 K² each, too.
        products = 4 if self.penalty is None else 7
        return tokens * 2 * self.d_model * (products * self.head_dim + int(self.normalizer))
