"""The loggers of a run: TensorBoard events in the run folder itself, and other loggers of Lightning."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from longseq.tasks.training import targets


class RunLogger(TensorBoardLogger):
    """Writes the events of a run's fit and test into one file of `folder`.

    Events of an interrupted run from `purge_step` on are hidden.
    """

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False, purge_step=purge_step)

    @rank_zero_only
    def log_results(self, parameters: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Show flat hyper-parameters beside these metrics, logged before, in TensorBoard's HPARAMS tab."""
        # TensorBoardLogger.log_hyperparams would write every metric a second time, at step 0 of its chart.
        plain = {key: value if isinstance(value, int | float) else str(value) for key, value in parameters.items()}
        for summary in hparams(plain, dict(metrics)):
            self.experiment.file_writer.add_summary(summary)

    @rank_zero_only
    def save(self) -> None:
        # Lightning's copy of the hyper-parameters would repeat config.yaml.
        self.experiment.flush()

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Write what is logged before a checkpoint: a run that is killed later goes on from there, and not before."""
        self.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        # Lightning calls this after fit and again after test; closing would begin another file each time.
        self.save()


def build_loggers(logger: Any, first_update: int | None = None) -> list[Logger]:
    """The loggers of the group `logger`: one logger, several by name, or none.

    They go on after an interrupted run that continues after `first_update` updates.
    """
    entries = {"logger": logger} if logger and targets.TARGET in logger else logger or {}
    loggers = []
    for name, options in entries.items():
        if not options:
            continue
        if first_update is not None and targets.find(options, targets.LOGGERS, name) is RunLogger:
            options = {**options, "purge_step": first_update}
        loggers.append(targets.build(options, targets.LOGGERS, name))
        if first_update is not None and isinstance(loggers[-1], CSVLogger):
            _keep_rows(loggers[-1], first_update)
    return loggers


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
    """Give the flat configuration to the loggers as a run begins; TensorBoard gets it at the end, with the results."""
    for logger in loggers:
        if not isinstance(logger, RunLogger):
            logger.log_hyperparams(dict(parameters))


def writes_events(loggers: Iterable[Logger]) -> bool:
    """True if a run has events that TensorBoard shows."""
    return any(isinstance(logger, TensorBoardLogger) for logger in loggers)


@rank_zero_only
def close_loggers(loggers: Iterable[Logger]) -> None:
    """Close the files and runs of loggers, as a process may train several models."""
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.experiment.close()
        elif isinstance(logger, WandbLogger):
            logger.experiment.finish()
