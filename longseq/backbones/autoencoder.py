"""A model that encodes a sequence into one vector and decodes the sequence from it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from longseq.backbones.tokens import NORMS, TokenBackbone
from longseq.blocks.sharding import full_parameters, gathers_parameters
from longseq.models import PretrainedModel, register_kind


@register_kind("sequence_autoencoder")
class SequenceAutoencoder(PretrainedModel, nn.Module):
    """Rebuilds every token of a sequence from the feature of its last one.

    The decoder adds fixed sinusoids of the position to that feature and applies (norm, linear, GELU) twice and a norm;
    the encoder's head then scores the tokens.

    Source: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024), the compression task.
    """

    def __init__(self, encoder: TokenBackbone) -> None:
        super().__init__()
        width = encoder.d_model
        self.encoder = encoder
        self.decoder = nn.Sequential(
            NORMS["rms"](width), nn.Linear(width, width), nn.GELU(),
            NORMS["rms"](width), nn.Linear(width, width), nn.GELU(), NORMS["rms"](width),
        )  # fmt: skip

    def init_weights(self) -> None:
        """Initialise all weights, as after `to_empty`."""
        self.encoder.init_weights()
        with full_parameters(self.decoder):
            layers: Any = self.decoder
            for layer in layers:
                if not isinstance(layer, nn.GELU):
                    layer.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the token at each position of `tokens [B, T]`: `[B, T, vocab_size]`."""
        return self.forward_head(self.forward_features(tokens)[0])

    @gathers_parameters
    def forward_features(self, tokens: Tensor, *, output_final_state: bool = False) -> tuple[Tensor, None]:
        """Return the decoder's features `[B, T, d_model]` and no state; ValueError for `output_final_state=True`."""
        if output_final_state:
            raise ValueError("a sequence autoencoder has no state (output_final_state)")
        code = self.encoder.forward_features(tokens, output_final_state=False)[0][:, -1:]
        return self.decoder(code + sinusoids(tokens.shape[1], code.shape[-1]).to(code)), None

    @gathers_parameters
    def forward_head(self, features: Tensor) -> Tensor:
        """Score the vocabulary by features `[..., d_model]`."""
        return self.encoder.forward_head(features)

    def get_classifier(self) -> nn.Module:
        """Return the encoder's head."""
        return self.encoder.get_classifier()

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters that are exempt from weight decay."""
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()}

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one sequence; a multiply-add counts as two."""
        return self.encoder.flops(tokens) + 2 * tokens * 2 * self.encoder.d_model**2


def sinusoids(length: int, width: int, base: float = 10000.0) -> Tensor:
    """Sines and cosines of the positions 0 ... length - 1, at frequencies from 1 down to 1/base: `[length, width]`.

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.5.
    """
    half = math.ceil(width / 2)
    frequency = base ** -(torch.arange(half) / max(1, half - 1))
    angle = torch.arange(length)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width]
