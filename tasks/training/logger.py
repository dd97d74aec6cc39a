"""The loggers of a run, with TensorBoard events in the run folder itself, and the log file of a run."""

import csv
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from longseq.tasks.training import targets


class RunLogger(TensorBoardLogger):
    """Writes the events of a run into one file of `folder`; hides those of an interrupted run from `purge_step` on."""

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False, purge_step=purge_step)

    @rank_zero_only
    def save(self, *_: Any) -> None:
        # Lightning's copy of the hyper-parameters would repeat config.yaml.
        self.experiment.flush()

    # A killed run goes on from its last checkpoint. Lightning would begin another file after fit, and after test.
    after_save_checkpoint = finalize = save  # type: ignore[assignment]


def build_loggers(logger: Any, first_update: int | None = None) -> list[Logger]:
    """The loggers of the group `logger` by name; in a resumed run, after `first_update` updates."""
    loggers = []
    for name, options in (logger or {}).items():
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
    # Lightning deletes an earlier file when it opens the folder. Kept rows are written with the first new one.
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


def find_board(loggers: Iterable[Logger]) -> TensorBoardLogger | None:
    """The logger that TensorBoard shows, which accepts pictures; None if the run has only other loggers."""
    return next((logger for logger in loggers if isinstance(logger, TensorBoardLogger)), None)


@rank_zero_only
def close_loggers(loggers: Iterable[Logger]) -> None:
    """Close the files and runs of loggers, as a process may train several models."""
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.experiment.close()
        elif isinstance(logger, WandbLogger):
            logger.experiment.finish()


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Append log records to `hydra.job.name`.log in a run folder: all of this package, and warnings of others.

    Does nothing without a command, or if Hydra writes a log.
    """
    if not HydraConfig.initialized() or HydraConfig.get().job_logging["root"] is not None:
        yield
        return
    handler = logging.FileHandler(folder / f"{HydraConfig.get().job.name}.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))  # as Hydra's
    root, package = logging.getLogger(), logging.getLogger("longseq")
    level = package.level
    root.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.setLevel(level)
        root.removeHandler(handler)
        handler.close()
