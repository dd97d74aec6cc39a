"""The residual block of every backbone: norm, reading, add; and, where the chassis has one, norm, MLP, add."""

from __future__ import annotations

from typing import Any, Generic

from timm.layers import DropPath
from torch import Tensor, nn

from longseq.blocks.norm import add_and_norm
from longseq.blocks.positions import Layout
from longseq.blocks.precision import product_dtype
from longseq.blocks.reading import Reading
from longseq.blocks.sharding import gathers_parameters
from longseq.kernels.packing import Packing
from longseq.state import StateT


class Block(nn.Module, Generic[StateT]):
    """A pre-norm residual block around a reading of the sequence and an optional MLP.

        x = x + mixer(norm1(x));   x = x + mlp(norm2(x))

    The residual keeps the type it comes in (float32, say) whatever the type of the weights.

    Args:
        mixer: the reading: a mixer, or several that read in different directions.
        norm: its norm.
        mlp, mlp_norm: the channel mixer and its norm, both or neither.
        drop_path: probability of leaving a branch out for a sample, in training.
    """

    mixer: Reading[StateT]

    def __init__(
        self,
        mixer: Reading[StateT],
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

    def forward(
        self,
        x: Tensor,
        state: StateT | None = None,
        *,
        layout: Layout | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, StateT | None]:
        """Transform `x [B, T, D]`; the arguments and the state are those of `longseq.blocks.reading.Reading`."""
        y, following = self.mixer(
            self.enter(x),
            state,
            layout=layout,
            cu_seqlens=cu_seqlens,
            mask=mask,
            output_final_state=output_final_state,
        )
        return self.add_branches(x, y), following

    @gathers_parameters
    def step(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Transform one more token `x [B, D]`; raises ValueError for a reading in several directions."""
        y, following = self.mixer.step(self.enter(x), state)
        return self.add_branches(x, y), following

    def enter(self, x: Tensor) -> Tensor:
        """What the mixer reads of the residual."""
        return self.norm1(x)

    def add_branches(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add what the mixer gives, and then the MLP's branch, to the residual."""
        branch = self.drop_path(branch)
        if self.mlp is None or self.norm2 is None:
            return x + branch
        x, y = add_and_norm(self.norm2, x, branch)
        return x + self.drop_path(self.mlp(y))

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one sequence, without norms and additions."""
        layers = [] if self.mlp is None else [part for part in self.mlp.modules() if isinstance(part, nn.Linear)]
        return self.mixer.flops(tokens) + 2 * tokens * sum(layer.weight.numel() for layer in layers)


class PostNormBlock(Block[StateT]):
    """A residual block that norms what is added, and not what is read.

        x = x + norm1(mixer(x));   x = x + norm2(mlp(x))

    Source: 2 OLMo 2 Furious (OLMo team, 2024), section 3.3, the reordered norm.
    """

    def enter(self, x: Tensor) -> Tensor:
        norm: Any = self.norm1
        return x.to(product_dtype(norm.weight))

    def add_branches(self, x: Tensor, branch: Tensor) -> Tensor:
        x = x + self.drop_path(self.norm1(branch))
        if self.mlp is None or self.norm2 is None:
            return x
        return x + self.drop_path(self.norm2(self.mlp(self.enter(x))))
