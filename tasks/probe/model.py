"""The models of the probes: a token model, inside an autoencoder for compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from longseq.backbones.autoencoder import SequenceAutoencoder
from longseq.tasks.probe.data import ProbeInfo
from longseq.tasks.training.token_model import TokenModel, build_token_model


class ProbeModel(TokenModel):
    """Builds the token model that `config.model` describes, for the probe's vocabulary."""

    def build(self, config: Mapping[str, Any], info: ProbeInfo) -> nn.Module:
        """The model of a configuration; an option that is null has the model's default."""
        backbone = build_token_model(config, vocab_size=info.vocab_size, longest=info.longest)
        return SequenceAutoencoder(backbone) if info.rebuild else backbone
