"""What gated slot attention and ABC share: a layer with a fixed number of memory slots."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from longseq.arguments import check_choice
from longseq.blocks.norm import RMSNorm
from longseq.blocks.pairs import repeat_rows
from longseq.blocks.precision import at_least_float32
from longseq.kernels import slot_attention, slot_attention_step
from longseq.kernels.slot_attention import ACTIVATIONS
from longseq.mixers.base import ALL_TOKENS, Device, Mixer, ScanOptions, memory_dtype, required
from longseq.mixers.heads import FEATURE_MAPS, check_groups, choose_heads, repeat_groups


class SlotState(NamedTuple):
    """The slots' keys and values `[B, H, M, K]`, and ABC's log normalisers `[B, H, M]` (None for gated slots)."""

    keys: Tensor
    values: Tensor
    normalizer: Tensor | None

    @property
    def memory(self) -> Tensor:
        """Keys and values side by side."""
        return torch.cat((self.keys, self.values), -1)


class SlotMixer(Mixer[SlotState]):
    """Base of GSA and ABC: attention to M slots; a subclass defines how tokens are written to them.

        q, k = φ(W x);   v = ψ(W_v x);   K̃ ← Diag(α) K̃ + w kᵀ;   Ṽ ← Diag(α) Ṽ + w vᵀ
        y = W_o RMSNorm(SiLU(Ṽᵀ f(scale K̃ q)))

    The norm is over all channels, not over each head. `value_map` is ψ; `gate_width` counts the channels of the input
    projection for the gates. See the mixers for the other options.
    """

    reads_backwards: ClassVar[bool] = True
    reads_pairs: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        *,
        gate_width: int,
        value_map: str,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_slots: int = 64,
        feature_map: str = "silu",
        activation: str = "softmax",
        scale: float = 1.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, backend=backend)
        check_choice("activation", activation, ACTIVATIONS)
        width = d_model if head_dim is None else num_heads * head_dim
        self.num_heads, self.head_dim = choose_heads(width, num_heads, head_dim, preferred=1)
        self.num_kv_heads = check_groups(self.num_heads, num_kv_heads)
        self.num_slots = num_slots
        self.feature_map = feature_map
        self.value_map = value_map
        self.activation = activation
        self.scale = scale
        self.gate_width = gate_width
        self.key_width = (self.num_heads + self.num_kv_heads) * self.head_dim
        self.value_width = self.num_kv_heads * self.head_dim
        self.in_proj = nn.Linear(d_model, self.key_width + self.value_width + gate_width, bias=False)
        self.norm = RMSNorm(width, eps=norm_eps, backend=backend)
        self.out_proj = nn.Linear(width, d_model, bias=False)

    def write(
        self, logits: Tensor, normalizer: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log α and w `[B, T, H, M]` (w is None where it is 1 - α), and the normalisers, from `gate_width` channels."""
        raise NotImplementedError

    def write_pair(self, backward: Self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Log α and w for tokens that are read forward by this mixer and backward by `backward`: 2 B rows."""
        raise NotImplementedError

    def write_step(self, logits: Tensor, normalizer: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`write` for one token; the shapes are the same without T."""
        raise NotImplementedError

    def scan(
        self, projected: Tensor, state: SlotState | None = None, options: ScanOptions = ALL_TOKENS
    ) -> tuple[Tensor, SlotState | None]:
        q, k, v, logits = self._split(projected)
        normalizer = None if state is None else state.normalizer
        g, write, normalizer = self.write(logits, normalizer, options)
        memory = None if state is None else (state.keys, state.values)
        call = {**self._rule, **self.call_options(options), "write": write}
        o, memory = slot_attention(q, k, v, g, initial_state=memory, **call)
        return self._read_out(o), SlotState(*required(memory), normalizer) if options.output_final_state else None

    def scan_pair(self, backward: Self, projected: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v, logits = self._split(projected)
        g, write = self.write_pair(backward, logits, mask)
        q, k, v = repeat_rows(q), repeat_rows(k), repeat_rows(v)
        o, _ = slot_attention(q, k, v, g, write=write, **self._rule, reverse="second_half", backend=self.backend)
        return self.norm.norm_pair(backward.norm, functional.silu(o.flatten(-2)))

    def scan_step(self, projected: Tensor, state: SlotState) -> tuple[Tensor, SlotState]:
        q, k, v, logits = self._split(projected)
        g, write, normalizer = self.write_step(logits, state.normalizer)
        options = {**self._rule, "backend": self.step_backend}
        o, memory = slot_attention_step(q, k, v, g, (state.keys, state.values), write=write, **options)
        return self._read_out(o), SlotState(*memory, normalizer)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> SlotState:
        shape = (batch, self.num_heads, self.num_slots, self.head_dim)
        slots = torch.zeros(shape, device=device, dtype=memory_dtype(dtype))
        return SlotState(slots, slots.clone(), None)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, v, logits = projected.split([self.key_width, self.value_width, self.gate_width], dim=-1)
        mixed, v = FEATURE_MAPS[self.feature_map](mixed), FEATURE_MAPS[self.value_map](v)
        mixed = mixed.unflatten(-1, (self.num_heads + self.num_kv_heads, self.head_dim))
        q, k = mixed.split([self.num_heads, self.num_kv_heads], dim=-2)
        k, v = (repeat_groups(x, self.num_heads) for x in (k, v.unflatten(-1, (self.num_kv_heads, self.head_dim))))
        return q, k, v, at_least_float32(logits)

    @property
    def _rule(self) -> dict[str, Any]:
        """The options of the operation, for sequences and for one token."""
        return {"scale": self.scale, "activation": self.activation}

    def _read_out(self, o: Tensor) -> Tensor:
        return self.norm(functional.silu(o.flatten(-2)))

    def scan_flops(self, tokens: int) -> int:
        # For the keys and for the values of each head: the decay takes M K, writing and reading 2 M K each.
        return tokens * 2 * 5 * self.num_slots * self.num_heads * self.head_dim
