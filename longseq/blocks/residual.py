"""The residual block of every backbone: norm, reading, add; and, where the chassis has one, norm, MLP, add."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from longseq.blocks.channel_mixing import ChannelMixing
from longseq.blocks.hooks import has_observers, step_by_call
from longseq.blocks.norm import add_and_norm
from longseq.blocks.positions import Layout
from longseq.blocks.precision import product_dtype
from longseq.blocks.sharding import gathers_parameters
from longseq.kernels.packing import Packing, pack_like
from longseq.state import Device, StateT, StateTree, loadable


@loadable
class ChannelMixingState(NamedTuple):
    """The state of a block with a `ChannelMixing`: the mixer's, and the last token `[B, D, 1]` of the MLP."""

    mixer: StateTree
    shift: Tensor


class Carried(NamedTuple):
    """The residual `[B, T, D]` with values `[B, T, C]` that the first layer of a mixer made for its others."""

    residual: Tensor
    values: Tensor


def carry(residual: Tensor, values: Tensor | None) -> Tensor | Carried:
    """What a block passes to the next one: the residual, with values if there are any."""
    return residual if values is None else Carried(residual, values)


def residual_of(x: Tensor | Carried) -> Tensor:
    """The residual without values."""
    return x.residual if isinstance(x, Carried) else x


class SequenceDropPath(DropPath):
    """timm's stochastic depth, which draws for each row, or for each packed sequence."""

    def forward(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        """Leave out rows of `x [B, T, D]`, or packed sequences, and scale the others; in training only."""
        if packing is None or not self.training:
            return super().forward(x)
        kept = super().forward(x.new_ones(packing.count))
        return x * kept[packing.sequence].unsqueeze(-1)


class Block(nn.Module, Generic[StateT]):
    """A pre-norm residual block around a reading of the sequence and an optional MLP.

        x = x + mixer(norm1(x));   x = x + mlp(norm2(x))

    The residual keeps its type (such as float32) whatever the type of the weights. The state is the mixer's; with a
    `ChannelMixing` as MLP it is a `ChannelMixingState`. Values for later layers (see `longseq.mixers.Mixer`) come with
    the residual, as `Carried`, from the layer that makes them on.

    Args:
        mixer, norm: a `longseq.mixers.Mixer` or `longseq.mixers.Directions`, and the norm of its input.
        mlp, mlp_norm: the channel mixer and its norm, both or neither.
        drop_path: probability of dropping a branch of a row, or of a packed sequence, in training.
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
        self.drop_path = SequenceDropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self,
        x: Tensor | Carried,
        state: StateT | None = None,
        *,
        layout: Layout | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Any, StateT | None]:
        """Transform `x [B, T, D]`; arguments and results are as for `longseq.mixers.Mixer.forward`."""
        own, shift = self._split(state)
        packing = pack_like(cu_seqlens, residual_of(x))
        options: dict[str, Any] = {"cu_seqlens": packing, "mask": mask, "output_final_state": output_final_state}
        y, following = self.mixer(self.receive(x), own, layout=layout, **options)
        x, y, values = self.take(x, y)
        if not isinstance(self.mlp, ChannelMixing):
            return carry(self.add_branches(x, y, packing), values), following
        x, y = self.add_mixed(x, y, packing)
        y, shift = self.mlp(y, shift, **options)
        return carry(self.add_mlp(x, y, packing), values), self._join(following, shift)

    @gathers_parameters
    def step(self, x: Tensor | Carried, state: StateT) -> tuple[Any, StateT]:
        """Transform one more token `x [B, D]`; raises ValueError for a reading in several directions."""
        if has_observers(self):
            return step_by_call(self, x, state)
        own, shift = self._split(state)
        y, following = self.mixer.step(self.receive(x), own)
        x, y, values = self.take(x, y)
        if not isinstance(self.mlp, ChannelMixing):
            return carry(self.add_branches(x, y), values), following
        assert shift is not None
        x, y = self.add_mixed(x, y)
        y, shift = self.mlp.step(y, shift)
        return carry(self.add_mlp(x, y), values), self._join(following, shift)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> StateT:
        """Return the state before the first token, of a block that reads in one direction."""
        state = self.mixer.initial_state(batch, device, dtype)
        if not isinstance(self.mlp, ChannelMixing):
            return state
        return self._join(state, self.mlp.initial_state(batch, device, dtype))

    def mixer_state(self, state: StateT) -> Any:
        """The mixer's part of a state."""
        return self._split(state)[0]

    def change_mixer_state(self, state: StateT, change: Callable[[Any], Any]) -> StateT:
        """Return a state with the result of `change` in place of its mixer's part."""
        own, shift = self._split(state)
        return self._join(change(own), shift)

    def _split(self, state: StateT | None) -> tuple[Any, Tensor | None]:
        if isinstance(state, ChannelMixingState):
            return state
        return state, None

    def _join(self, state: Any, shift: Tensor | None) -> Any:
        return state if shift is None else ChannelMixingState(state, shift)

    def receive(self, x: Tensor | Carried) -> Tensor:
        """The mixer's input: `enter`, and behind its channels the values if the mixer reads them."""
        y = self.enter(residual_of(x))
        return torch.cat((y, x.values.to(y.dtype)), dim=-1) if isinstance(x, Carried) and self.mixer.reads_values else y

    def take(self, x: Tensor | Carried, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual, the mixer's output for it, and the values for later layers, which may come from this mixer."""
        residual, values = x if isinstance(x, Carried) else (x, None)
        if not self.mixer.makes_values:
            return residual, y, values
        return residual, y[..., : residual.shape[-1]], y[..., residual.shape[-1] :]

    def enter(self, x: Tensor) -> Tensor:
        """The first channels of the mixer's input, from the residual."""
        return self.norm1(x)

    def add_branches(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> Tensor:
        """Add the mixer's output, and then the MLP's, to the residual."""
        if self.mlp is None:
            return x + self._drop(branch, packing)
        x, y = self.add_mixed(x, branch, packing)
        return self.add_mlp(x, self.mlp(y), packing)

    def add_mixed(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
        """Add the mixer's output to the residual; returns the residual and the MLP's input."""
        assert self.norm2 is not None
        return add_and_norm(self.norm2, x, self._drop(branch, packing))

    def add_mlp(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> Tensor:
        """Add the MLP's output to the residual."""
        return x + self._drop(branch, packing)

    def _drop(self, branch: Tensor, packing: Packing | None) -> Tensor:
        # A replaced part takes only the branch.
        if packing is None or not isinstance(self.drop_path, SequenceDropPath):
            return self.drop_path(branch)
        return self.drop_path(branch, packing)

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one sequence, without norms and additions."""
        layers = [] if self.mlp is None else [part for part in self.mlp.modules() if isinstance(part, nn.Linear)]
        return self.mixer.flops(tokens) + 2 * tokens * sum(layer.weight.numel() for layer in layers)


class PostNormBlock(Block[StateT]):
    """A residual block that norms what is added instead of what is read.

        x = x + norm1(mixer(x));   x = x + norm2(mlp(x))

    Source: 2 OLMo 2 Furious (OLMo team, 2024), section 3.3, the reordered norm.
    """

    def enter(self, x: Tensor) -> Tensor:
        norm: Any = self.norm1
        return x.to(product_dtype(norm.weight))

    def add_branches(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> Tensor:
        x, y = self.add_mixed(x, branch, packing)
        return x if self.mlp is None else self.add_mlp(x, self.mlp(y), packing)

    def add_mixed(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
        x = x + self._drop(self.norm1(branch), packing)
        return x, self.enter(x)

    def add_mlp(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> Tensor:
        assert self.norm2 is not None
        return x + self._drop(self.norm2(branch), packing)
