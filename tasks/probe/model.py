"""The models of the probes: token models, and for compression an autoencoder around one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from longseq.backbones.autoencoder import SequenceAutoencoder
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.probe.info import ProbeInfo
from longseq.tasks.training.model import TaskModel, mixer_options

# The one model of this task, as `config.model` names it.
MODEL = "token"


class ProbeModel(TaskModel):
    """Builds the token model that `config.model` describes, for the probe's vocabulary."""

    def build(self, config: Mapping[str, Any], info: ProbeInfo) -> nn.Module:
        """The model of a configuration; options that are null there are left to the model."""
        options = {key: value for key, value in config["model"].items() if key not in ("name", "label")}
        if config["model"]["name"] != MODEL:
            raise ValueError(f"task=probe trains token models: take model=token in place of {config['model']['name']}")
        mlp = options.pop("mlp", None)
        options = {key: value for key, value in options.items() if value is not None}
        if options.get("positions") == "learned":
            options.setdefault("max_length", info.longest)
        torch.manual_seed(config["seed"])
        try:
            backbone = TokenBackbone(
                vocab_size=info.vocab_size,
                mixer=config["mixer"]["name"],
                mixer_options=mixer_options(config),
                mlp=None if mlp == "none" else mlp,
                **options,
            )
        except TypeError as error:
            raise ValueError(f"model=token does not take these options: {error}") from error
        return SequenceAutoencoder(backbone) if info.rebuild else backbone
