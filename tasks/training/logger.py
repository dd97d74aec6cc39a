"""TensorBoard events in the run folder itself."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams


class RunLogger(TensorBoardLogger):
    """Writes the events of a run's fit and test into one file of `folder`."""

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
    def close(self) -> None:
        """Close the file and the thread that writes it, at the end of a run: a process may train several."""
        if self._experiment is not None:
            self._experiment.close()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        # Lightning calls this after fit and again after test; closing would begin another file each time.
        self.save()
