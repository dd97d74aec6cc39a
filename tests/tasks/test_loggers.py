"""Loggers of a run, the log in its folder, and searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from lightning.pytorch.loggers import Logger

from longseq.tasks import train
from longseq.tasks.training import targets


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
def test_a_run_has_a_log_where_hydra_says(command_here, tmp_path, tiny_overrides):
    name = "a b=c[1]{2}'"  # the folder may have any
    overrides = (*tiny_overrides, "recipe.epochs=1", "logger=none", f"output={name}", "data.num_workers=0")
    done = command_here(tmp_path, "train", *overrides, "hydra.job.name=mine")
    assert done.returncode == 0, done.stderr
    told = (tmp_path / name / "mine.log").read_text()
    assert "val/top1" in told
    assert "test/top1" in told


@pytest.mark.slow
def test_a_search_returns_the_metric_of_its_best_trial(command_here, tmp_path: Path, tiny_overrides):
    search = ("hparams_search=optuna", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=search", "data.num_workers=0")
    # A rate on the command line would replace the range that the search draws from.
    free = [word for word in tiny_overrides if not word.startswith("recipe.learning_rate")]
    overrides = (*free, "recipe.epochs=1", "logger=none", *search)
    done = command_here(tmp_path, "train", *overrides)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load((tmp_path / "search" / "optimization_results.yaml").read_text())
    (metrics,) = (tmp_path / "search").glob("*/metrics.json")
    assert found["best_value"] == json.loads(metrics.read_text())["val/top1"]
    assert 1e-4 <= found["best_params"]["recipe.learning_rate"] <= 1e-2
    assert "best val/top1" in done.stdout
