"""The search of a learning rate before a run, by Lightning's `Tuner.lr_find`: `recipe.learning_rate=find`.

The rate rises from update to update (Smith 2015, arXiv:1506.01186), and the one at which the smoothed loss falls most
steeply is suggested.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.tuner import Tuner

from longseq.tasks.data.module import TaskData
from longseq.tasks.training.files import write_text
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import effective_learning_rate
from longseq.tasks.training.trainer import build_trainer

# The files of the curve in the run folder.
TABLE, PICTURE = "learning_rates.csv", "learning_rates.png"


def find_learning_rate(
    config: Mapping[str, Any], module: TrainedModule, datamodule: TaskData, folder: Path
) -> tuple[float, float]:
    """The suggested rate of an update, and the value of `recipe.learning_rate` that gives it.

    `module` is one of its own for the search, which trains it. Its length is left to the Trainer here, its schedule is
    replaced. The folder receives the curve: learning_rates.csv, and learning_rates.png where matplotlib is installed.
    ValueError if the loss falls at no rate.
    """
    options = config["learning_rate_finder"]
    with tempfile.TemporaryDirectory() as place:  # for the weights from before the search, which the Tuner restores
        trainer = build_trainer({**config, "logger": None, "output": place})
        trainer.fit_loop.epoch_loop.max_steps = options["num_training"]
        trainer.check_val_every_n_epoch = options["num_training"] + 1  # more epochs than the search can have
        with redirect_stderr(io.StringIO()):  # the bar of the search, which Lightning shows without a terminal, too
            curve: Any = Tuner(trainer).lr_find(module, datamodule=datamodule, update_attr=False, **options)
    rates, losses = curve.results["lr"], curve.results["loss"]
    lines = [f"{rate:.6g},{loss:.6g}" for rate, loss in zip(rates, losses, strict=False)]
    write_text(folder / TABLE, "\n".join(["learning_rate,loss", *lines]) + "\n")
    if find_spec("matplotlib") is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
        curve.plot(suggest=True, ax=figure.add_subplot())
        figure.savefig(folder / PICTURE)
    found = curve.suggestion()
    if found is None:
        raise ValueError("recipe.learning_rate=find: the loss falls at no rate; give a number")
    scale = effective_learning_rate({**config, "recipe": {**config["recipe"], "learning_rate": 1.0}})
    return found, float(f"{found / scale:.3g}")
