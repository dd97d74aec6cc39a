"""TTT with a linear inner model, as the Lattice paper states it."""

from typing import Any

from longseq.arguments import takes_also
from longseq.mixers.compression import CompressionMixer
from longseq.mixers.registry import register


@register("ttt")
class TTT(CompressionMixer):
    """A memory that is a linear model: each token is one gradient step on decoding its value from its key.

        z = S k;   S ← S − γ P(z) (z / ‖z‖ − v) kᵀ / ‖z‖;   y = W_o (S q ⊙ GELU(W_g x));   P(z) = I − z zᵀ / ‖z‖²

    The layer is Lattice's, but TTT normalises the decoded value instead of the slots. The TTT paper differs: its inner
    model is z + LayerNorm(z) with a learned scale and bias and an inner loss on v − k, its initial state is learned, it
    takes gradient steps over mini-batches of 16 tokens (here chunk_size=16), and it normalises the output before the
    gate.

    Args:
        num_heads, head_dim: give at most one; by default heads of 64 channels (32, ... where 64 does not divide).
        gamma_activation: sigmoid (the TTT paper's, with a base rate of 1) or softplus, of a projection of the token.
        chunk_size: with 1, each gradient is taken at the state before its token. With more, the gradients of that many
            tokens are taken at the state before all of them: faster, and another function. One-token steps are always
            those of chunk_size=1. Chunks are counted from the first real token of a row or a piece.

    Source: Lattice (Karami and Mirrokni, 2025), equation 19, after Learning to (Learn at Test Time) (Sun et al., 2024).
    """

    paper = "Lattice (arXiv:2504.05646), equation 19; TTT (arXiv:2407.04620)"

    @takes_also(CompressionMixer, without=("recurrence", "num_slots", "forget_gate"))
    def __init__(self, d_model: int, **options: Any) -> None:
        super().__init__(d_model, recurrence={"objective": "ttt"}, forget_gate=False, **options)

    def scan_flops(self, tokens: int) -> int:
        # For each head, decoding at the key, writing there and reading at the query take 2 D M each.
        return tokens * 6 * self.d_model * self.num_slots
