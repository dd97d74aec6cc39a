"""The processes of a run and of its data workers."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_started_by_run() -> bool:
    """True if Lightning started this process, from the first one of the run."""
    return int(os.environ.get("LOCAL_RANK") or 0) > 0 and "TORCHELASTIC_RUN_ID" not in os.environ


def prepare_data_worker(index: int) -> None:
    """Give a data worker a process group of its own, so that signals to the run reach only the trainer.

    The trainer ends its workers, as torch does it, and a worker whose trainer is gone ends within seconds.
    """
    os.setpgid(0, 0)
