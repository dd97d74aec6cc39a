"""The residual block of every backbone: norm, mixer, add; and, where the chassis has one, norm, MLP, add."""

from __future__ import annotations

from typing import Any

from timm.layers import DropPath
from torch import Tensor, nn

from longseq.blocks.norm import add_and_norm
from longseq.blocks.positions import Layout, move_token_back, move_token_first
from longseq.blocks.sharding import gathers_parameters
from longseq.kernels.packing import Packing


class ResidualBlock(nn.Module):
    """The parts of a pre-norm residual block around a mixing layer and an optional MLP.

    The residual keeps the type it comes in (float32, say) whatever the type of the weights.

    Args:
        mixer: the mixing layer.
        norm: its norm.
        mlp, mlp_norm: the channel mixer and its norm, both or neither.
        drop_path: probability of leaving a branch out for a sample, in training.
    """

    def __init__(
        self,
        mixer: Any,
        norm: nn.Module,
        *,
        mlp: nn.Module | None = None,
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

    def add_branches(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add the mixing layer's branch to `x`, and then the MLP's, where there is one."""
        branch = self.drop_path(branch)
        if self.mlp is None or self.norm2 is None:
            return x + branch
        x, y = add_and_norm(self.norm2, x, branch)
        return x + self.drop_path(self.mlp(y))

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one sequence, without norms and additions."""
        layers = [] if self.mlp is None else [part for part in self.mlp.modules() if isinstance(part, nn.Linear)]
        return self.mixer.flops(tokens) + 2 * tokens * sum(layer.weight.numel() for layer in layers)


class Block(ResidualBlock):
    """A residual block whose mixing layer reads an image (see `longseq.blocks.scan.Directions`)."""

    def forward(self, x: Tensor, layout: Layout | None = None, token_first: bool = False) -> Tensor:
        """Transform `x [B, T, D]`; `layout` says where patches stand, for directions that read columns.

        With `token_first` the class token stands before the patches in `x` and in the result, and at its place in
        between only.
        """
        if layout is None or not token_first:
            return self.add_branches(x, self.mixer(self.norm1(x), layout))
        return move_token_first(self.forward(move_token_back(x, layout), layout), layout)


class SequenceBlock(ResidualBlock):
    """A residual block whose mixing layer is a mixer itself, with the state that it carries along a sequence."""

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, Any]:
        """Transform `x [B, T, D]`; the arguments and the state are those of `longseq.mixers.Mixer`."""
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "mask": mask, "output_final_state": output_final_state}
        y, state = self.mixer(self.norm1(x), state, **options)
        return self.add_branches(x, y), state

    @gathers_parameters
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Transform one more token `x [B, D]`."""
        y, state = self.mixer.step(self.norm1(x), state)
        return self.add_branches(x, y), state
