"""A `longseq` that notes which images each process gets, and ends after an update.

The environment has the folder of the notes (NOTES) and the update (STOP_AFTER).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longseq.tasks.image.datasets import Batch, TrainingBatches
from longseq.tasks.training.module import TrainedModule

give, end_batch = TrainingBatches.__getitem__, TrainedModule.on_train_batch_end


def give_and_note(batches: TrainingBatches, indices: list[Any]) -> Batch:
    with (Path(os.environ["NOTES"]) / os.environ.get("LOCAL_RANK", "0")).open("a") as file:
        print(indices[0].epoch, *(index.position for index in indices), file=file)
    return give(batches, indices)


def end_batch_and_stop(module: TrainedModule, *arguments: Any) -> None:
    end_batch(module, *arguments)
    if module.global_step == int(os.environ.get("STOP_AFTER", -1)):
        os.kill(os.getpid(), signal.SIGTERM)


def patch(set_attribute: Callable[[type, str, Any], None]) -> None:
    """Let the trainings of this process note their images and stop."""
    set_attribute(TrainingBatches, "__getitem__", give_and_note)
    set_attribute(TrainedModule, "on_train_batch_end", end_batch_and_stop)
