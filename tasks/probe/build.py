"""From a configuration to the parts of a probe run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from longseq.backbones.autoencoder import SequenceAutoencoder
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.probe.data import ProbeDataModule
from longseq.tasks.probe.info import ProbeInfo
from longseq.tasks.probe.module import ProbeTask
from longseq.tasks.probe.slices import slice_names

Config = Mapping[str, Any]

# The one model of this task, as `config.model` names it.
MODEL = "token"


def build_datamodule(config: Config, batch_size: int) -> ProbeDataModule:
    """The data module, set up; `batch_size` is what one device takes in a step."""
    if "generator" not in config["data"]:
        raise ValueError(
            f"data={config['data']['name']} is no probe: task=probe takes data=mqar and others; see --help"
        )
    datamodule = ProbeDataModule(**config["data"], batch_size=batch_size, seed=config["seed"])
    datamodule.setup()
    return datamodule


def build_backbone(config: Config, info: ProbeInfo, mixer_options: dict[str, Any]) -> nn.Module:
    """The token model that `config.model` describes, for the probe's vocabulary; drawn from `config.seed`.

    Options that are null are left to the model. ValueError for an unknown model, mixer or option.
    """
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
            mixer_options=mixer_options,
            mlp=None if mlp == "none" else mlp,
            **options,
        )
    except TypeError as error:
        raise ValueError(f"model=token does not take these options: {error}") from error
    return SequenceAutoencoder(backbone) if info.rebuild else backbone


def build_task(
    config: Config, backbone: nn.Module, info: ProbeInfo, learning_rate: float, optimizer: Any, schedule: Any
) -> ProbeTask:
    """The Lightning module around `backbone`; its checkpoints carry the configuration and the probe's description."""
    recipe, data = config["recipe"], config["data"]
    return ProbeTask(
        backbone,
        slices={"val": slice_names(data["validation"]), "test": slice_names(data["test"])},
        optimizer=optimizer,
        schedule=schedule,
        learning_rate=learning_rate,
        epochs=recipe["epochs"],
        seed=config["seed"],
        compile_mode=config.get("compile"),
        hyperparameters={"config": config, "data": info.to_dict()},
    )
