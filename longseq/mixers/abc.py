"""Attention with bounded-memory control (ABC)."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from longseq.arguments import takes_also
from longseq.blocks.pairs import repeat_rows
from longseq.kernels import cumulative_softmax, cumulative_softmax_step
from longseq.kernels.cumulative_softmax.reference import NOTHING
from longseq.mixers.base import Device, ScanOptions
from longseq.mixers.registry import register
from longseq.mixers.slots import SlotMixer, SlotState


@register("abc")
class BoundedMemoryControl(SlotMixer):
    """Attention to M slots, each a softmax average of all keys and of all values so far.

        q, k, v = φ(W x);   z ← log(e^z + e^{W_φ x});   w = e^{W_φ x − z}
        K̃ ← Diag(1 − w) K̃ + w kᵀ;   Ṽ ← Diag(1 − w) Ṽ + w vᵀ
        y = W_o RMSNorm(SiLU(Ṽᵀ f(scale K̃ q)))

    The state holds the log normaliser z, so that K̃_t = Σ_s softmax(W_φ x_1, ..., W_φ x_t)_s k_s. This is GSA with α =
    1 − w. `renormalize=False` leaves out Diag(1 − w), as the GSA paper states ABC (its equations 3 and 4): each token
    keeps its first weight, and slots grow with log T.

    Args:
        num_heads: a divisor of `d_model`.
        num_slots: M, the slots of each head.
        renormalize: shrink the weights of earlier tokens, so that all weights sum to one.
        feature_map: φ, one of silu, relu, relu_squared, identity. silu is from the layer in which the GSA paper
            compares ABC; ABC itself has identity.
        activation: f: softmax over the slots, or the elementwise identity, silu, relu or relu_squared.
        scale: the factor of the scores. The papers have none; 1/√K is usual for softmax.

    Source: ABC: Attention with Bounded-memory Control (Peng et al., 2022), section 4, in the layer of Gated Slot
    Attention (Zhang et al., 2024), equations 8 and 9.
    """

    paper = "ABC (arXiv:2110.02488), section 4"
    operations = ("cumulative_softmax", "slot_attention")

    @takes_also(SlotMixer, without=("gate_width", "value_map", "num_kv_heads", "head_dim"))
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        num_slots: int = 64,
        renormalize: bool = True,
        feature_map: str = "silu",
        **options: Any,
    ) -> None:
        options |= {"num_heads": num_heads, "num_slots": num_slots, "gate_width": num_heads * num_slots}
        super().__init__(d_model, feature_map=feature_map, value_map=feature_map, **options)
        self.renormalize = renormalize

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> SlotState:
        state = super().initial_state(batch, device, dtype)
        return state._replace(normalizer=torch.full_like(state.keys[..., 0], NOTHING))

    def write(
        self, logits: Tensor, normalizer: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = logits.unflatten(-1, (self.num_heads, self.num_slots))
        real = None if options.mask is None else options.mask[..., None, None]
        logits = logits if real is None else logits.masked_fill(~real, NOTHING)
        g, normalizer = cumulative_softmax(logits, initial_state=normalizer, **self.call_options(options))
        return *self._gates(g if real is None else g * real), normalizer

    def write_pair(self, backward: Self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.write(repeat_rows(logits), None, ScanOptions.of_pair(mask))[:2]

    def write_step(self, logits: Tensor, normalizer: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert normalizer is not None
        logits = logits.unflatten(-1, (self.num_heads, self.num_slots))
        g, normalizer = cumulative_softmax_step(logits, normalizer, backend=self.step_backend)
        return *self._gates(g), normalizer

    def _gates(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log α and w from log (1 − w)."""
        return (g, None) if self.renormalize else (torch.zeros_like(g), -torch.expm1(g))
