"""The rank of a process in its run, and how far its training has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict


class Place(NamedTuple):
    """A process: its rank among `world_size` processes, and how many batches it accumulates for an update."""

    rank: int = 0
    world_size: int = 1
    accumulate: int = 1


class Followed(TypedDict, total=False):
    """What a `TrainingLoader` asks of the Trainer."""

    trained: Callable[[], int]
    respread: Callable[[int, int], None]


def find_place(trainer: Any) -> Place:
    """Return the place of this process. Without a Trainer it is the only process."""
    if trainer is None:
        return Place()
    return Place(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)


def follow(trainer: Any) -> Followed:
    """How a `TrainingLoader` learns from a Trainer what was trained, and tells it of another number of batches."""
    if trainer is None:
        return {}
    progress = trainer.fit_loop.epoch_loop.batch_progress

    def respread(then: int, now: int) -> None:
        """Count the batches of the checkpoint, written after an update, as if `now` made an update and not `then`."""
        for counts in (progress.total, progress.current):
            behind = counts.ready - counts.completed  # the callbacks of the last batch write before it is completed
            counts.ready = counts.started = counts.processed = counts.ready // then * now
            counts.completed = counts.ready - behind

    return {"trained": lambda: progress.current.processed, "respread": respread}
