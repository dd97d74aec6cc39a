"""The rank of a process in its run, and the training progress that a loader needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict


class Place(NamedTuple):
    """The rank of a process among `world_size` processes, and the batches that it accumulates for an update."""

    rank: int = 0
    world_size: int = 1
    accumulate: int = 1


class Followed(TypedDict, total=False):
    """The functions that connect a `TrainingLoader` with the Trainer."""

    trained: Callable[[], int]
    respread: Callable[[int, int], None]


def find_place(trainer: Any) -> Place:
    """Return the place of this process; without a Trainer it is the only process."""
    if trainer is None:
        return Place()
    return Place(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)


def follow(trainer: Any) -> Followed:
    """The functions by which a `TrainingLoader` reads a Trainer's progress, and rescales its counts of batches."""
    if trainer is None:
        return {}
    progress = trainer.fit_loop.epoch_loop.batch_progress

    def respread(then: int, now: int) -> None:
        """Rescale the Trainer's counts of batches, saved after an update of `then` batches, to updates of `now`
        batches.
        """
        for counts in (progress.total, progress.current):
            behind = counts.ready - counts.completed  # callbacks save before their batch counts as completed
            counts.ready = counts.started = counts.processed = counts.ready // then * now
            counts.completed = counts.ready - behind

    return {"trained": lambda: progress.current.processed, "respread": respread}
