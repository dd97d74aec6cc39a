"""Every option of every group composes and binds, and every experiment runs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_object, instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

import longseq.conf
from longseq import mixers
from longseq.tasks import assemble, train
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.info import DataInfo

CONF = Path(longseq.conf.__file__).parent
GROUPS = ("task", "mixer", "model", "scale", "data", "recipe", "trainer", "callbacks", "logger")
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.relative_to(CONF / "experiment") for path in (CONF / "experiment").rglob("*.yaml"))
SMALL = DataInfo(["a", "b"], 2, 32, 3, [0.5] * 3, [0.5] * 3, "bicubic", 1.0)


def bind(target: Any, **arguments: Any) -> None:
    """Raise TypeError where the call would not bind; nothing is called."""
    inspect.signature(target).bind(**arguments)


def bind_target(node: dict[str, Any], *leading: Any, **arguments: Any) -> None:
    options = {key: value for key, value in node.items() if key not in ("_target_", "_partial_")}
    inspect.signature(get_object(node["_target_"])).bind(*leading, **options, **arguments)


def test_the_groups_are_those_tested_here():
    assert {path.parent.name for path in CONF.glob("*/*.yaml")} == set(GROUPS)


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}-{option}" for group, option in OPTIONS])
def test_every_option_composes_and_binds(group, option, compose_config, tmp_path):
    config = assemble.plain(compose_config("train", f"{group}={option}", f"output={tmp_path}"))
    bind(ImageDataModule, **config["data"], batch_size=1, seed=0, augment=config["recipe"]["augment"])
    bind(Trainer, **config["trainer"])
    bind(mixers.get(config["mixer"]["name"]), d_model=8, **config["mixer"]["options"])
    bind_target(config["recipe"]["optimizer"], None, lr=0.1)
    bind_target(config["recipe"]["schedule"], None, num_epochs=1, updates_per_epoch=1)
    assert isinstance(instantiate(config["logger"]), Logger)
    callbacks = assemble.build_callbacks(config)
    assert len(callbacks) == len(config["callbacks"]) + bool(config["recipe"]["ema"])


MODELS = [option for option in OPTIONS if option[0] in ("mixer", "model", "scale")]


@pytest.mark.parametrize(("group", "option"), MODELS, ids=[f"{group}-{option}" for group, option in MODELS])
def test_every_model_builds(group, option, compose_config, tmp_path):
    config = compose_config("train", f"{group}={option}", f"output={tmp_path}")
    with torch.device("meta"):
        backbone = assemble.build_backbone(config, SMALL)
    assert sum(parameter.numel() for parameter in backbone.parameters()) > 0
    assert backbone.num_classes == 2


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=str)
def test_every_experiment_states_its_claim_and_runs(
    experiment, compose_config, tmp_path, request, image_folder, fashion_mnist
):
    header = (CONF / "experiment" / experiment).read_text().split("defaults:")[0]
    name = experiment.with_suffix("").as_posix()
    assert f"longseq train experiment={name}" in header
    assert "Expected:" in header
    assert "Hardware:" in header
    root = fashion_mnist if "fashion_mnist" in name else image_folder
    config = compose_config(
        "train",
        f"experiment={name}",
        f"data.root={root}",
        "data.num_workers=0",
        "data.eval_batch_size=2",
        "trainer=cpu",
        "trainer.fast_dev_run=true",
        "recipe.batch_size=2",
        "++model.depth=2",
        "compile=null",
        f"output={tmp_path}",
    )
    train.run(config)
