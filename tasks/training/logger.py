"""The loggers of a run: TensorBoard events in the run folder itself, and those of other programs."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from longseq.tasks.training import targets

# The packages that loggers need beside ours, and the extras that bring them.
PACKAGES = {"WandbLogger": ("wandb", "wandb"), "MLFlowLogger": ("mlflow", "mlflow")}


class RunLogger(TensorBoardLogger):
    """Writes the events of a run's fit and test into one file of `folder`."""

    FILES = ("events.out.tfevents.*",)

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False)

    def continue_at(self, step: int) -> None:
        """Hide the events of an interrupted run from `step` on; call it before anything is logged."""
        self._kwargs["purge_step"] = step

    @rank_zero_only
    def log_results(self, parameters: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Show flat hyper-parameters beside these metrics, logged before, in TensorBoard's HPARAMS tab."""
        # TensorBoardLogger.log_hyperparams would write every metric a second time, at step 0 of its chart.
        writer = self.experiment._get_file_writer()
        for summary in hparams(self._sanitize_params(dict(parameters)), dict(metrics)):
            writer.add_summary(summary)

    @rank_zero_only
    def save(self) -> None:
        # Lightning's copy of the hyper-parameters would repeat config.yaml.
        self.experiment.flush()

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Write what is logged before a checkpoint: a run that is killed later goes on from there, and not before."""
        self.save()

    @rank_zero_only
    def close(self) -> None:
        """Close the file and the thread that writes it, at the end of a run: a process may train several."""
        if self._experiment is not None:
            self._experiment.close()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        # Lightning calls this after fit and again after test; closing would begin another file each time.
        self.save()


def check_loggers(logger: Any) -> None:
    """Raise ValueError, in one line, for a logger that does not take its options, or whose package is missing."""
    for place, options in logger_entries(logger).items():
        targets.check_options(options, targets.LOGGERS, place)
        name = str(options[targets.TARGET]).rpartition(".")[2]
        package, extra = PACKAGES.get(name, (None, None))
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(f"{place}: {name} needs the package {package}: pip install 'longseq[{extra}]'")


def build_loggers(logger: Any) -> list[Logger]:
    """The loggers of the group `logger`: a logger by itself, several by name, or none."""
    check_loggers(logger)
    return [targets.build(options, targets.LOGGERS, place) for place, options in logger_entries(logger).items()]


def continue_loggers(loggers: Iterable[Logger], step: int) -> None:
    """Let loggers go on after an interrupted run that continues at `step`; call it before anything is logged."""
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.continue_at(step)
        elif isinstance(logger, CSVLogger):
            _keep_rows(logger, step)


@rank_zero_only
def _keep_rows(logger: CSVLogger, step: int) -> None:
    # Lightning deletes the file of an earlier run when it opens the folder. What is kept is written with the first row.
    path = Path(logger.log_dir) / ExperimentWriter.NAME_METRICS_FILE
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    logger.experiment.metrics[:0] = [row for row in rows if int(row.get("step", 0)) < step]


def log_metrics(loggers: Iterable[Logger], metrics: Mapping[str, float], step: int) -> None:
    """Give the same metrics to every logger of a run."""
    for logger in loggers:
        logger.log_metrics(metrics=dict(metrics), step=step)


def log_parameters(loggers: Iterable[Logger], parameters: Mapping[str, Any]) -> None:
    """Tell loggers the flat configuration as a run begins; TensorBoard gets it at the end, beside the results."""
    for logger in loggers:
        if not isinstance(logger, RunLogger):
            logger.log_hyperparams(dict(parameters))


def writes_events(loggers: Iterable[Logger]) -> bool:
    """True if a run has events that TensorBoard shows."""
    return any(isinstance(logger, TensorBoardLogger) for logger in loggers)


def close_loggers(loggers: Iterable[Logger]) -> None:
    """End what loggers have open, as a process may train several models."""
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.close()
        elif isinstance(logger, WandbLogger):
            _finish(logger)


@rank_zero_only
def _finish(logger: WandbLogger) -> None:
    # Otherwise the next run of this process would continue the run of Weights & Biases.
    if logger._experiment is not None:
        logger._experiment.finish()


def logger_entries(logger: Any) -> dict[str, Mapping[str, Any]]:
    """The place in the configuration and the options of each logger."""
    if not logger:
        return {}
    if not isinstance(logger, Mapping):
        raise ValueError(f"logger={logger} must be a logger with {targets.TARGET}, or several by name")
    if targets.TARGET in logger:
        return {"logger": logger}
    for name, options in logger.items():
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"logger.{name}={options} must be a logger with {targets.TARGET}, or null")
    return {f"logger.{name}": options for name, options in logger.items() if options}
