"""The gated MLP of the token models."""

from __future__ import annotations

from timm import layers
from torch import Tensor

from longseq.blocks.recompute import checkpoint_if
from longseq.kernels.dispatch import backend_of_local
from longseq.kernels.silu_product import silu_product


class SwiGLU(layers.SwiGLU):
    """timm's SwiGLU without norm, and by default without biases, whose gated product is one operation.

        y = fc2(fc1_x(x) ⊙ SiLU(fc1_g(x)))

    With `recompute` the product is not kept for the gradient of `fc2`, but multiplied again.
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
        return checkpoint_if(self.recompute, self._project_product, self.fc1_x(x), self.fc1_g(x))

    def _project_product(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.fc2(silu_product(x, gate, backend=self.backend))
