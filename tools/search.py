"""A Hydra callback that prints the best trial of a search by Optuna."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from longseq.tasks.report import print_rows, shorten

# Where Optuna's sweeper writes the best trial, in the folder of the sweep.
RESULTS_FILE = "optimization_results.yaml"


class BestTrial(Callback):
    """Prints the best trial at the end of a search; conf/hparams_search names it."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        results = Path(config.hydra.sweep.dir) / RESULTS_FILE
        if not results.is_file():
            return
        found: Any = OmegaConf.to_container(OmegaConf.load(results))
        rows = [(f"best {config.optimized_metric}", f"{found['best_value']:.4f}")]
        rows += [(str(key).lstrip("+"), str(value)) for key, value in found["best_params"].items()]
        print_rows([*rows, ("written", shorten(results))])
