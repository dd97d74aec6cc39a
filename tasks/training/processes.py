"""The processes of a run: they end with the process that started them, and data workers ignore signals to the run."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

# Set by the first process of a run, so that the processes that it starts know their parent.
PARENT_VARIABLE = "LONGSEQ_PARENT"
# Set by a comparison for the runs that it starts.
COMPARISON_VARIABLE = "LONGSEQ_COMPARISON"
# Set by torchrun in the processes that it starts.
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"

# As many processes are never refused, nor as many for each core: more of them only wait for each other.
_FEW, _PER_CORE = 64, 8

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_POLL_SECONDS = 1.0


def usable_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_many(count: int | None, key: str) -> None:
    """Raise ValueError, in one line, for more processes than the cores of this machine could serve."""
    most = max(_FEW, _PER_CORE * usable_cores())
    if count is not None and count > most:
        raise ValueError(f"{key}={count} are more processes than {usable_cores()} cores can serve: give at most {most}")


def followed_by_child() -> dict[str, str]:
    """Environment variables for a run that is to end with this process (see `follow_parent`)."""
    return {COMPARISON_VARIABLE: str(os.getpid())}


def count_started_by_torchrun() -> int | None:
    """How many processes torchrun has started, with this one; None if it has not started this one."""
    started = os.environ.get("WORLD_SIZE")
    return int(started) if TORCHRUN_VARIABLE in os.environ and started else None


def follow_parent() -> None:
    """Make this process end when its parent does, also by SIGKILL: a run, a comparison or torchrun.

    The first process of a run becomes the parent of the others. Without this, a rank whose parent is gone would wait in
    a collective for ever and hold its GPU, and the runs of an ended comparison would compete with those of the next.
    """
    if (comparison := os.environ.pop(COMPARISON_VARIABLE, None)) is not None:
        _die_with(int(comparison))
    if is_started_by_run():
        _die_with(int(os.environ[PARENT_VARIABLE]))
    elif TORCHRUN_VARIABLE in os.environ:
        _die_with(os.getppid())
    else:
        os.environ[PARENT_VARIABLE] = str(os.getpid())


def is_started_by_run() -> bool:
    """True if Lightning started this process, from the first one of the run."""
    return int(os.environ.get("LOCAL_RANK") or 0) > 0 and PARENT_VARIABLE in os.environ


def own_name() -> str | None:
    """`process 1 of this run` and so on, by the variables of those that start processes; None for the first one."""
    rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if os.environ.get(name)), "0")
    return f"process {rank} of this run" if rank != "0" else None


def prepare_data_worker(index: int) -> None:
    """Give a data worker a process group of its own, so that signals to the run reach only the trainer.

    The trainer ends its workers, as torch does it, and a worker whose trainer is gone ends within seconds.
    """
    os.setpgid(0, 0)


def _die_with(parent: int) -> None:
    try:
        is_set = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
    except (AttributeError, OSError):
        is_set = False
    # The parent may have ended before the call, and systems other than Linux send no signal.
    if os.getppid() != parent:
        os._exit(1)
    if not is_set:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
