"""The time mixing of RWKV-6 (Finch)."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.blocks.norm import UpcastGroupNorm
from longseq.blocks.precision import at_least_float32
from longseq.blocks.token_shift import latest_token, previous_tokens, previous_tokens_pair, shift_tokens
from longseq.kernels import linear_attention, linear_attention_step
from longseq.kernels.reading import halves
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import choose_heads
from longseq.mixers.registry import register
from longseq.mixers.states import ShiftedState

PARTS = 5  # the decay, the key, the value, the receptance and the gate, in this order, each mix two tokens


@register("rwkv6")
class RWKV6(Mixer[ShiftedState]):
    """Linear attention with a decay that depends on the token, a bonus for the current token and a token shift.

        x_□ = x_t + (x_{t−1} − x_t) ⊙ (μ_□ + tanh((x_t + (x_{t−1} − x_t) ⊙ μ_x) A_□) B_□)        □ in w, k, v, r, g
        k, v, r = W_k x_k, W_v x_v, W_r x_r;   w = exp(−exp(d + tanh(x_w A) B))
        o_t = (S_{t−1} + (u ⊙ k) vᵀ)ᵀ r;   S_t = Diag(w) S_{t−1} + k vᵀ;   y = W_o (GroupNorm(o) ⊙ SiLU(W_g x_g))

    Two tokens are mixed before they are projected, with the consequences described for `RWKV4`. μ, d and u start with
    the published code's values for the middle layer of a network. A starts with small numbers instead of zeros, so that
    B gets a gradient in the first step.

    Args:
        num_heads, head_dim: give at most one; by default heads of 64 channels (32, ... where 64 does not divide).
        shift_rank, decay_rank: widths of the low-rank terms (A_□ and A above).
        norm_eps: eps of the norm over each head's output.

    Source: Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence (Peng et al., 2024), section 4.2.
    """

    paper = "RWKV-6 (arXiv:2404.05892), section 4.2"
    operations = ("short_convolution", "linear_attention")
    reads_backwards = True
    reads_pairs = True
    no_weight_decay_names = ("shift_base", "shift_bases", "decay_base", "bonus")

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        shift_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: float = 64e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        self.num_heads, self.head_dim = choose_heads(d_model, num_heads, head_dim, preferred=64)
        self.shift_rank = shift_rank
        self.decay_rank = decay_rank
        self.in_proj = None
        self.shift_base = nn.Parameter(torch.empty(d_model))
        self.shift_bases = nn.Parameter(torch.empty(PARTS, d_model))
        self.shift_down = nn.Linear(d_model, PARTS * shift_rank, bias=False)
        self.shift_up = nn.Parameter(torch.empty(PARTS, shift_rank, d_model))
        self.decay_base = nn.Parameter(torch.empty(d_model))
        self.decay_down = nn.Linear(d_model, decay_rank, bias=False)
        self.decay_up = nn.Linear(decay_rank, d_model, bias=False)
        self.key, self.value, self.receptance, self.gate = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.bonus = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.norm = UpcastGroupNorm(self.num_heads, d_model, eps=norm_eps)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        depth = 0.5  # of the layer in the network, from 0 to 1
        # The device is named because transformers, which builds a model without memory, makes other ranges on the CPU.
        device = self.bonus.device
        place = torch.linspace(0, 1, self.d_model + 1, device=device)[:-1]  # of the channel, from 0 to 1
        amount = 1 - place ** (1 - depth)
        smaller = 1 - place ** ((1 - depth) / 2)
        self.shift_base.copy_(amount)
        self.shift_bases.copy_(torch.stack([amount, amount, amount - 0.3 * depth, smaller, smaller]))
        self.shift_down.weight.uniform_(-1e-2, 1e-2)
        self.shift_up.uniform_(-1e-2, 1e-2)
        ends = torch.linspace(0, 1, self.d_model, device=device)
        self.decay_base.copy_(5 * ends ** (0.7 + 1.3 * depth) - 6)
        self.decay_down.weight.uniform_(-1e-2, 1e-2)
        self.decay_up.weight.uniform_(-1e-2, 1e-2)
        zigzag = 0.1 * ((torch.arange(self.d_model, device=device) + 1) % 3 - 1)
        self.bonus.copy_((depth * (1 - ends) + zigzag).view_as(self.bonus))

    def project_in(self, x: Tensor) -> Tensor:
        return x

    def scan(
        self, projected: Tensor, state: ShiftedState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, ShiftedState | None]:
        shift, memory = (None, None) if state is None else state
        packing, mask, reverse, output_final_state = options
        previous, latest = previous_tokens(projected, shift, **self.call_options(options), mask=mask)
        r, k, v, decay, gate = self._project(projected, previous)
        if mask is not None:
            k, decay = k * mask[..., None, None], decay * mask[..., None, None]
        o, memory = self._recur(r, k, v, decay, memory, options)
        if output_final_state:
            r_last, k_last, v_last, decay_last = (
                latest_token(x, packing=packing, reverse=reverse) for x in (r, k, v, decay)
            )
            _, memory = linear_attention_step(
                r_last, k_last, v_last, required(memory), g=decay_last, backend=self.step_backend
            )
        y = self._read_out(o, r, k, v, gate)
        return y, ShiftedState(required(latest), required(memory)) if output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        options = ScanOptions.of_pair(mask)
        previous = previous_tokens_pair(projected, mask=mask, backend=self.backend)
        pair = (self, backward)
        tokens = [mixer._project(projected, own) for mixer, own in zip(pair, halves(previous), strict=True)]
        r, k, v, decay = (torch.cat(both) for both in list(zip(*tokens, strict=True))[:4])
        if options.mask is not None:
            k, decay = (x * options.mask[..., None, None] for x in (k, decay))
        o, _ = self._recur(r, k, v, decay, None, options)
        ahead, behind = (
            mixer._read_out(own, r, k, v, gate)
            for mixer, own, (r, k, v, _, gate) in zip(pair, halves(o), tokens, strict=True)
        )
        return ahead + behind

    def scan_step(self, projected: Tensor, state: ShiftedState) -> tuple[Tensor, ShiftedState]:
        previous = state.shift.squeeze(-1).to(projected.dtype)
        r, k, v, decay, gate = self._project(projected, previous)
        o, _ = linear_attention_step(r, torch.zeros_like(k), v, state.memory, backend=self.step_backend)
        _, memory = linear_attention_step(r, k, v, state.memory, g=decay, backend=self.step_backend)
        return self._read_out(o, r, k, v, gate), ShiftedState(projected.to(state.shift.dtype).unsqueeze(-1), memory)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> ShiftedState:
        dtype = memory_dtype(dtype)
        memory = torch.zeros(batch, self.num_heads, self.head_dim, self.head_dim, device=device, dtype=dtype)
        return ShiftedState(torch.zeros(batch, self.d_model, 1, device=device, dtype=dtype), memory)

    def _recur(
        self, r: Tensor, k: Tensor, v: Tensor, decay: Tensor, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        """S_{t−1}ᵀ r_t for all tokens, and the last S_{t−1} if it is wanted.

        A token reads the state before it: keys, values and decays enter the operation one token later, the last ones
        not at all.
        """
        packing = options.cu_seqlens
        rows = r.shape[0] if packing is None else packing.count
        k, v, decay = (
            shift_tokens(x, x.new_zeros(rows, *x.shape[2:]), packing=packing, reverse=options.reverse)
            for x in (k, v, decay)
        )
        return linear_attention(r, k, v, g=decay, initial_state=memory, **self.call_options(options))

    def _project(self, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Receptance, key, value and log decay `[..., H, K]`, and the gate `[..., d_model]`, of each token."""
        change = previous - x
        hidden = torch.tanh(self.shift_down(x + change * self.shift_base.to(x.dtype)))
        hidden = hidden.unflatten(-1, (PARTS, self.shift_rank))
        amount = torch.einsum("...pr,prd->...pd", hidden, self.shift_up.to(hidden.dtype)) + self.shift_bases.to(x.dtype)
        mixed = x.unsqueeze(-2) + change.unsqueeze(-2) * amount
        for_decay, for_key, for_value, for_receptance, for_gate = mixed.unbind(-2)
        low_rank = self.decay_up(torch.tanh(self.decay_down(for_decay)))
        decay = -(self.decay_base + at_least_float32(low_rank)).exp()
        r, k, v = self.receptance(for_receptance), self.key(for_key), self.value(for_value)
        r, k, v, decay = (part.unflatten(-1, (self.num_heads, self.head_dim)) for part in (r, k, v, decay))
        return r, k, v, decay, self.gate(for_gate)

    def _read_out(self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """Add the bonus of the current token, normalise each head, and gate."""
        r, k, v, o = (at_least_float32(part) for part in (r, k, v, o))
        o = o + (r * self.bonus * k).sum(-1, keepdim=True) * v
        normed = self.norm(o.flatten(-2).flatten(0, -2))
        return normed.view(gate.shape).to(gate.dtype) * functional.silu(gate)

    def scan_flops(self, tokens: int) -> int:
        # The decay takes K V, writing and reading 2 K V each, and the bonus 3 K and 2 V.
        recurrence = 5 * self.d_model * self.head_dim + 5 * self.d_model
        return tokens * (2 * self.shift_up.numel() + recurrence)
