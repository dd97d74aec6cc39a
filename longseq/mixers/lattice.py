"""Lattice: memory slots that are updated only orthogonally to themselves."""

from typing import Any

from torch import Tensor

from longseq.arguments import check_choice, takes_also
from longseq.kernels import map_features
from longseq.mixers.compression import CompressionMixer
from longseq.mixers.registry import register

# Operations for one token and entry of the memory: eight to scale, write, measure the norm, divide by it, and read at
# the query; two for each product that computes the update.
FLOPS_PER_ENTRY = {"decode": 12, "encode": 10, "similarity": 10}


@register("lattice")
class Lattice(CompressionMixer):
    """A memory of slots of unit length, updated at each token by a gradient step on the sphere.

        S ← N(μ S + Δ);   y = W_o (S q ⊙ GELU(W_g x))
        decode:      Δ_i = −γ k_i P(s_i) (S k − v)
        encode:      Δ_i = −γ (s_iᵀ v − k_i) P(s_i) v
        similarity:  Δ_i = γ k_i P(s_i) v

    where s_i are the columns of S, P(s) = I − s sᵀ, and N divides each column by its length. See
    `longseq.kernels.orthogonal_recurrence` for the recurrence, `CompressionMixer` for the rest of the layer.

    Args:
        objective: the reconstruction whose error the update reduces; decode is the best of the paper's three.
        num_heads, head_dim: give at most one; by default heads of 64 channels (32, ... where 64 does not divide).
        num_slots: columns of a head's memory, at most head_dim, which is the default. The paper gives neither this
            number nor the number of heads; the default memory is as large as DeltaNet's with these heads.
        gamma_activation: sigmoid or softplus, of a projection of the token. The paper names none; TTT has sigmoid.
        forget_gate: learn μ = sigmoid(W_μ x + b), else μ = 1. The last row of the paper's table 4 has the gate, with
            little effect.
        normalize: False leaves out N (the second ablation of the paper's table 4).
        normalize_key: divide each head's key by its length, as DeltaNet does; the paper does not. See below.

    A step of the decode objective overshoots if γ ‖k‖² > 2; small differences then grow from token to token, and the
    paper's layer does not bound the keys. Where hundreds of tokens are equal, gradients can overflow: in zoology's
    recall, and at update 9 of a language model of 110M parameters (benchmarks/README.md). Small models of text with
    clipped gradients have trained. `normalize_key` with the sigmoid keeps γ ‖k‖² at most 1.

    Source: Lattice: Learning to Efficiently Compress the Memory (Karami and Mirrokni, 2025), equations 7, 10, 12, 14
    and 16.
    """

    paper = "Lattice (arXiv:2504.05646), equations 7 to 16"
    no_weight_decay_names = ("forget_bias",)

    @takes_also(CompressionMixer, without=("recurrence", "chunk_size"))
    def __init__(
        self,
        d_model: int,
        *,
        objective: str = "decode",
        normalize: bool = True,
        normalize_key: bool = False,
        **options: Any,
    ) -> None:
        check_choice("objective", objective, FLOPS_PER_ENTRY)
        super().__init__(d_model, recurrence={"objective": objective, "normalize": normalize}, **options)
        self.normalize_key = normalize_key

    def _to_keys(self, k: Tensor) -> Tensor:
        keys = super()._to_keys(k)
        return map_features(keys, norm="l2", backend=self.local_backend) if self.normalize_key else keys

    def scan_flops(self, tokens: int) -> int:
        operations = FLOPS_PER_ENTRY[self.recurrence["objective"]]
        return tokens * operations * self.d_model * self.num_slots
