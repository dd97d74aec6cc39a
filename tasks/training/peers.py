"""What is told of a run that lost one of its processes or a data worker, and how the others end then."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Trainer
from torch import distributed

from longseq.tasks.training.processes import is_started_by_run

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# How long the first process waits for the end of another one that has closed its connections.
_SETTLE_SECONDS = 3.0
# How long the first process may go on after another one has failed: it may wait in a collective for ever.
_GRACE_SECONDS = 5.0
# How long another process keeps an error to itself: if the first one has failed, too, or tells the loss, it ends it.
_OWN_ERROR_SECONDS, _LOSS_SECONDS = 2.0, 10.0

_END = b"\0"  # no signal has this number
_noted: list[int] = []  # the file to which Python writes the numbers of signals, while a run is watched

_OF_A_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
_BY_A_SIGNAL = re.compile(r"is killed by signal: (?P<signal>[^.]+)\.")
_OF_PEERS = re.compile(r"gloo|NCCL|TCPStore|process group", re.IGNORECASE)
_SOURCE_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")  # of gloo's messages
_TIMED_OUT = re.compile(r"Timed out waiting (?P<milliseconds>\d+)ms")


@contextmanager
def watched(trainer: Trainer) -> Iterator[None]:
    """Tell in one line, as a ValueError, if another process of the run or a data worker ends while the block runs.

    The error of the libraries, with its traceback, goes to the log of the run. All processes of a run enter the block.
    In the first one a thread sees within seconds that another one has failed, and ends the run if the block goes on,
    as it does in a collective whose partner is gone. It also ends the run at the second Ctrl-C. A process that the
    first one has started waits a moment with its error: that of the first one, if it has one, is the cause.
    """
    starts_others = getattr(trainer.strategy.launcher, "procs", None) is not None and not is_started_by_run()
    watch = _Watch(trainer) if starts_others else None
    if watch is not None:
        watch.begin()
    try:
        yield
    except Exception as error:
        told = describe_loss(error, trainer, watch)
        if is_started_by_run():
            time.sleep(_OWN_ERROR_SECONDS if told is None or _is_of_worker(error) else _LOSS_SECONDS)
        if told is None:
            raise
        _log.info("the run has lost a process: %s", told or "it has told why", exc_info=error)
        if not told:
            raise SystemExit(2) from error
        raise ValueError(told) from error
    finally:
        if watch is not None:
            watch.end()


def describe_loss(error: BaseException, trainer: Trainer, watch: _Watch | None = None) -> str | None:
    """One line about an error that comes from the loss of a data worker or another process; None for other errors.

    It is empty if the other process has told it.
    """
    if _is_of_worker(error):
        return _describe_worker(error)
    if not _is_of_peers(error):
        return None
    end = time.monotonic() + _SETTLE_SECONDS
    while watch is not None and time.monotonic() < end:
        if (lost := watch.find_lost()) is not None:
            return lost
        time.sleep(0.05)
    who = f"process {trainer.global_rank} of this run"
    if match := _TIMED_OUT.search(str(error)):
        silent = None if watch is None else watch.find_stopped()
        seconds = int(match["milliseconds"]) / 1000
        whom = (
            f"{silent} is stopped, and {who}" if silent else f"{who} waits for another one, which does not answer: it"
        )
        return f"{whom} has waited {seconds:g} seconds for it; see that all processes can go on"
    told = " ".join(_SOURCE_PLACE.sub("", str(error)).split()).partition(". ")[0]
    return f"{who} has lost another one, which has ended or cannot be reached ({told})"


class _Watch(threading.Thread):
    """Watches the processes that this one has started, and ends the run if one of them has failed.

    Lightning's own thread would end this process by SIGKILL, without a word.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(name="peers", daemon=True)
        self._trainer = trainer
        self._launcher: Any = trainer.strategy.launcher
        self._read, self._write = os.pipe()
        self._before: int | None = None

    def begin(self) -> None:
        os.set_blocking(self._write, False)
        if threading.current_thread() is threading.main_thread():
            # Python writes the numbers of signals here also while the main thread waits in a library.
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            _noted.append(self._write)
        self.start()

    def end(self) -> None:
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            _noted.remove(self._write)
        os.write(self._write, _END)  # data workers may hold this end, too: closing it tells the thread nothing
        self.join()
        os.close(self._write)
        os.close(self._read)

    def run(self) -> None:
        interrupts, failed = 0, None
        while True:
            if select.select([self._read], [], [], _POLL_SECONDS)[0]:
                numbers = os.read(self._read, 4096)
                if _END in numbers:
                    return
                interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                self._leave("interrupted twice", 128 + signal.SIGINT)
            _retire_lightnings_thread()
            if self.find_lost() is not None:
                failed = failed or time.monotonic()
                if time.monotonic() - failed > _GRACE_SECONDS:
                    self._leave(self.find_lost() or "", 2)

    def find_lost(self) -> str | None:
        """One line about the first process that has failed; empty if it has told of it by itself. None without one."""
        failed = [(rank, process) for rank, process in self._others() if process.poll()]
        if not failed:
            return None
        # One that was killed is the cause where others have failed, too.
        rank, process = min(failed, key=lambda one: (one[1].returncode > 0, one[0]))
        who, code = f"process {rank} of this run ({process.pid})", process.returncode
        if code == 2:
            return ""
        if code > 0:
            return f"{who} has ended with exit code {code}"
        hint = ": where memory is short, the system does that" if -code == signal.SIGKILL else ""
        return f"{who} was ended by {signal.Signals(-code).name}{hint}"

    def find_stopped(self) -> str | None:
        """A process that a signal has stopped, in words."""
        for rank, process in self._others():
            with suppress(OSError):
                if Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt":
                    return f"process {rank} of this run ({process.pid})"
        return None

    def _others(self) -> list[tuple[int, subprocess.Popen[Any]]]:
        return list(enumerate(self._launcher.procs, self._trainer.global_rank + 1))

    def _leave(self, told: str, code: int) -> None:
        """End this process, whatever its main thread waits for. Those that it has started end with it."""
        if told:
            print(f"longseq: error: {told}", file=sys.stderr)
            _log.info(told)
        sys.stderr.flush()
        os._exit(code)


def _forget_signals() -> None:
    if _noted:  # those of a data worker are its own
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)


def _retire_lightnings_thread() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_worker(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _OF_A_WORKER.search(str(error)) is not None


def _is_of_peers(error: BaseException) -> bool:
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _OF_PEERS.search(str(error)) is not None


def _describe_worker(error: BaseException) -> str:
    texts = [str(one) for one in _chain(error)]
    match = _OF_A_WORKER.search(texts[0])
    assert match is not None
    killed = next((found["signal"] for text in texts if (found := _BY_A_SIGNAL.search(text))), None)
    who = f"a data worker (process {match['pids']})"
    if killed == "Killed":
        return f"{who} was killed: where memory is short, the system does that; give a smaller data.num_workers"
    if killed == "Bus error":
        return f"{who} had no room left in shared memory: make /dev/shm larger, or give data.num_workers=0"
    how = "has ended" if killed is None else f"was ended by a signal ({killed})"
    return f"{who} {how}: data.num_workers=0 reads the data in the training process, which shows its errors"
