"""Gated DeltaProduct: several steps of the gated delta rule for each token."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longseq.arguments import takes_also
from longseq.blocks.precision import at_least_float32
from longseq.kernels import delta_rule, delta_rule_step
from longseq.kernels.head_features.features import unit_torch
from longseq.kernels.packing import Packing
from longseq.kernels.reading import Reverse, halves
from longseq.mixers.base import ScanOptions
from longseq.mixers.gated_deltanet import GatedDeltaNet
from longseq.mixers.heads import repeat_groups
from longseq.mixers.registry import register


@register("delta_product")
class GatedDeltaProduct(GatedDeltaNet):
    """Gated delta rule whose transition is a product of `steps` Householder-like matrices.

        q, k_i, v_i = SiLU(conv(W x));  q, k_i = q / ‖q‖, k_i / ‖k_i‖;  β_i = 2 sigmoid(W_β x)        i = 1 ... steps
        S ← exp(g) S;   S ← S + β_i k_i (v_i − Sᵀ k_i)ᵀ for each i in turn
        y = W_o (RMSNorm(Sᵀ q / √K) ⊙ SiLU(W_g x))

    g and the widths are as in `GatedDeltaNet`, which this is with one step. A token is as many tokens of the delta rule
    as it has steps: the decay belongs to the first, and the query to the last.

    Args:
        steps: the writes of a token.
        negative_eigenvalues: the factor 2 of β.

    Source: DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products (Siems et al., 2025).
    """

    paper = "DeltaProduct (arXiv:2502.10297), section 3"
    operations = ("short_convolution", "delta_rule")
    fused_features = False

    @takes_also(GatedDeltaNet, without=("feature_map", "key_norm"))
    def __init__(self, d_model: int, *, steps: int = 2, negative_eigenvalues: bool = True, **options: Any) -> None:
        self.steps = steps
        super().__init__(d_model, negative_eigenvalues=negative_eigenvalues, **options)

    def _features(self, inputs: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        """q `[..., H, K]`, and k, v and β of each step `[..., steps, H, ...]`."""
        widths = [self.key_width, self.steps * self.key_width, self.steps * self.value_width]
        q, k, v = functional.silu(inputs).split(widths, dim=-1)
        q, k = (x.unflatten(-1, (-1, self.num_heads, self.key_dim)) for x in (q, k))
        q, k = (unit_torch(at_least_float32(x), "l2").to(inputs.dtype) for x in (q, k))
        q, k = (repeat_groups(x, self.num_value_heads) for x in (q.squeeze(-3), k))
        v = v.unflatten(-1, (self.steps, self.num_value_heads, self.value_dim))
        return q, k, v, at_least_float32(logits).sigmoid().unflatten(-1, (self.steps, -1))

    def _recur(
        self, call: dict[str, Any], g: Tensor | None, memory: Tensor | None, options: ScanOptions
    ) -> tuple[Tensor, Tensor | None]:
        packing, mask, reverse, _ = options
        q, k, v, beta = call.values()
        assert g is not None
        if packing is not None:
            borders = packing.cu_seqlens
            more = packing.once(f"{self.steps} steps", lambda: Packing(borders * self.steps))
            options = options._replace(cu_seqlens=more)
        if mask is not None:
            beta, g = beta * mask[..., None, None], g * mask.unsqueeze(-1)
        q, g = _with_zeros(q, self.steps, last=True), _with_zeros(g, self.steps, last=False)
        # Within a token, the steps are always read from the first to the last.
        q, k, v, beta, g = (_turn_steps(x, reverse).flatten(1, 2) for x in (q, k, v, beta, g))
        call = {"g": g, "scale": self.key_dim**-0.5, "initial_state": memory, **self.call_options(options)}
        o, memory = delta_rule(q, k, v, beta, **call)
        return _turn_steps(o.unflatten(1, (-1, self.steps)), reverse)[:, :, -1], memory

    def _recur_step(self, call: dict[str, Any], g: Tensor | None, memory: Tensor) -> tuple[Tensor, Tensor]:
        q, *others = call.values()
        options: dict[str, Any] = {"scale": self.key_dim**-0.5, "backend": self.step_backend}
        o = q
        for step in range(self.steps):
            k, v, beta = (x[:, step] for x in others)
            o, memory = delta_rule_step(q, k, v, memory, beta, g=g if step == 0 else None, **options)
        return o, memory

    def scan_flops(self, tokens: int) -> int:
        # A further step reads at its key and writes there.
        more = 4 * (self.steps - 1) * self.num_value_heads * self.key_dim * self.value_dim
        return super().scan_flops(tokens) + tokens * more


def _with_zeros(x: Tensor, steps: int, *, last: bool) -> Tensor:
    """x `[B, T, ...]` as the last or first of the steps, with zeros at the others: `[B, T, steps, ...]`."""
    x = x.unsqueeze(2)
    zeros = x.new_zeros(()).expand(*x.shape[:2], steps - 1, *x.shape[3:])
    return torch.cat((zeros, x) if last else (x, zeros), dim=2)


def _turn_steps(x: Tensor, reverse: Reverse) -> Tensor:
    """x `[B, T, steps, ...]` with the steps of tokens that are read backward in reversed order."""
    if reverse == "second_half":
        ahead, behind = halves(x)
        return torch.cat((ahead, behind.flip(2)))
    return x.flip(2) if reverse else x
