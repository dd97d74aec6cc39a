"""The residual block of every backbone: norm, mixer, add; and, where the chassis has one, norm, MLP, add."""

from __future__ import annotations

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from longseq.blocks.positions import Layout
from longseq.blocks.scan import Directions


class Block(nn.Module):
    """A pre-norm residual block around a mixing layer and an optional MLP.

    The residual keeps the type it comes in (float32, say) whatever the type of the weights.

    Args:
        mixer: the mixing layer.
        norm: its norm.
        mlp, mlp_norm: the channel mixer and its norm, both or neither.
        drop_path: probability of leaving a branch out for a sample, in training.
    """

    def __init__(
        self,
        mixer: Directions,
        norm: nn.Module,
        *,
        mlp: Mlp | None = None,
        mlp_norm: nn.Module | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        assert (mlp is None) == (mlp_norm is None)
        self.norm1 = norm
        self.mixer = mixer
        self.norm2 = mlp_norm
        self.mlp = mlp
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, layout: Layout | None = None) -> Tensor:
        """Transform `x [B, T, D]`; `layout` says where patches stand, for directions that read columns."""
        x = x + self.drop_path(self.mixer(self.norm1(x), layout))
        if self.mlp is not None and self.norm2 is not None:
            x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one sequence, without norms and additions."""
        weights = 0 if self.mlp is None else self.mlp.fc1.weight.numel() + self.mlp.fc2.weight.numel()
        return self.mixer.flops(tokens) + 2 * tokens * weights
