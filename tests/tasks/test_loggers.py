"""Loggers of a run, one or several; the log in its folder; strategies as objects; searches."""

from __future__ import annotations

import json
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from longseq.tasks import train
from longseq.tasks.training import targets
from longseq.tasks.training.configuration import better, resolve
from longseq.tasks.training.logger import PACKAGES, check_loggers
from longseq.tasks.training.trainer import build_trainer


@targets.register("logger")
class KeptLogger(Logger):
    """Another program's logger, which takes numbers and nothing else."""

    runs: ClassVar[list[KeptLogger]] = []

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.metrics, self.parameters = place, {}, {}
        self.runs.append(self)

    @property
    def name(self) -> str:
        return self.place

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= {name: float(value) for name, value in metrics.items()}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters |= params


@pytest.mark.slow
def test_several_loggers_get_the_same_numbers(tiny, tmp_path, capsys):
    own = "+logger.kept={_target_: KeptLogger, place: here}"
    train.run(tiny("recipe.epochs=1", "logger=[tensorboard,csv]", own, "trainer.log_every_n_steps=5"))
    (kept,) = KeptLogger.runs
    assert kept.parameters["mixer.name"] == "attention"
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    for name in ("train/lr", "train/gradient_norm", "val/top1", "test/top1"):
        assert name in header, name
        assert name in kept.metrics, name
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
    assert "tensorboard --logdir" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_loggers_says_nothing_of_tensorboard(tiny, tmp_path, capsys):
    train.run(tiny("recipe.epochs=1", "logger=none"))
    assert not list((tmp_path / "run").glob("events.out.tfevents*"))
    assert "TensorBoard" not in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_logger_whose_package_is_missing_is_one_line(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    package, extra = PACKAGES[name]
    with pytest.raises(ValueError, match=rf"logger\.it: {name} needs the package {package}: .*longseq\[{extra}\]"):
        check_loggers({"it": {"_target_": name}})


@pytest.mark.slow
def test_a_run_has_a_log_where_hydra_says(command_here, tmp_path, tiny_overrides):
    root = logging.getLogger()
    before = list(root.handlers), root.level
    overrides = (*tiny_overrides, "recipe.epochs=1", "logger=none", "hydra.run.dir=run", "data.num_workers=0")
    done = command_here(tmp_path, "train", *overrides, "hydra.job.name=mine")
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "run" / "mine.log").read_text()
    assert "writing to run" in told
    assert "[INFO] - epoch 1, update" in told
    assert "val/top1" in told
    assert "test/top1" in told
    assert (list(root.handlers), root.level) == before


def test_a_strategy_is_an_object_with_arguments(tiny):
    options = "{_target_: DDPStrategy, find_unused_parameters: true, timeout: 60}"
    environment = "[{_target_: LightningEnvironment}]"
    config = tiny(f"+trainer.strategy={options}", f"+trainer.plugins={environment}", "+trainer.num_sanity_val_steps=1")
    trainer = build_trainer({**resolve(config), "logger": None})
    assert isinstance(trainer.strategy, DDPStrategy)
    assert trainer.strategy._ddp_kwargs["find_unused_parameters"] is True
    assert trainer.strategy._timeout == timedelta(seconds=60)
    assert trainer.num_sanity_val_steps == 1


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("val/top1", "maximize"),
        ("val/loss", "minimize"),
        ("test/bits_per_byte", "minimize"),
        ("val/calibration_error", "minimize"),
        ("images_per_second", "maximize"),
        ("seconds", "minimize"),
    ],
)
def test_the_direction_of_a_search_follows_from_its_metric(metric, direction):
    assert better(metric) == direction


@pytest.mark.slow
def test_a_search_returns_the_metric_of_its_best_trial(command_here, tmp_path: Path, tiny_overrides):
    search = ("hparams_search=optuna", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=search", "data.num_workers=0")
    overrides = (*tiny_overrides, "recipe.epochs=1", "logger=none", *search)
    done = command_here(tmp_path, "train", *overrides)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load((tmp_path / "search" / "optimization_results.yaml").read_text())
    (metrics,) = (tmp_path / "search").glob("*/metrics.json")
    assert found["best_value"] == json.loads(metrics.read_text())["val/top1"]
    assert 1e-4 <= found["best_params"]["recipe.learning_rate"] <= 1e-2
    assert "best val/top1" in done.stdout
    done = command_here(tmp_path, "train", *overrides, "hydra.sweep.dir=other", "hydra.sweeper.direction=minimize")
    assert done.returncode == 2
    assert "give hydra.sweeper.direction=maximize" in done.stderr
    assert not (tmp_path / "other").exists()
