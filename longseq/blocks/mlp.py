"""The gated MLP of the token models."""

from timm import layers
from torch import Tensor, nn

from longseq.blocks.hooks import is_replaceable
from longseq.blocks.recompute import checkpoint_if
from longseq.kernels.dispatch import backend_of_local
from longseq.kernels.silu_product import silu_product


class SwiGLU(layers.SwiGLU):
    """timm's SwiGLU without norm, and by default without biases, whose gated product is one operation.

        y = fc2(fc1_x(x) ⊙ SiLU(fc1_g(x)))

    With `recompute` the product is multiplied again in the backward pass instead of kept. timm's forward runs where a
    part besides the projections was replaced, has hooks, or drops.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        bias: bool = False,
        recompute: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(in_features, hidden_features, bias=bias)
        self.recompute = recompute
        self.backend = backend_of_local(backend)

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_plain():
            return checkpoint_if(self.recompute, super().forward, x)
        return checkpoint_if(self.recompute, self._project_product, self.fc1_x(x), self.fc1_g(x))

    def _is_plain(self) -> bool:
        drops = (self.drop1, self.drop2)
        return (
            is_replaceable(self.act, nn.SiLU)
            and is_replaceable(self.norm, nn.Identity)
            and all([is_replaceable(drop, nn.Dropout) and drop.p == 0 for drop in drops])
        )

    def _project_product(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.fc2(silu_product(x, gate, backend=self.backend))
