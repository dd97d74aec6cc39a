"""An orderly end when several processes are told to stop."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities.exceptions import SIGTERMException

from longseq.tasks.training.processes import is_started_by_run
from longseq.tasks.training.signals import answered


@contextmanager
def stoppable(trainer: Trainer) -> Iterator[None]:
    """Exit with 143 if SIGTERM ended a training or a test; with 129 after SIGHUP and 130 after Ctrl-C.

    SIGHUP, which a closed terminal sends, is taken for SIGTERM unless it is ignored, as under nohup. So is Ctrl-C where
    several processes have to stop together; where one runs alone, Lightning answers it, and exits with 1.
    """
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        # An error that is being handled ends the run by itself. The second Ctrl-C ends it at once: see `watched`.
        if sys.exc_info()[0] is not None or (received and number == signal.SIGINT):
            return
        received.append(number)
        if signal.getsignal(signal.SIGTERM) is stop:  # not Lightning's: no training or test is going on
            raise SystemExit(128 + number)
        if number != signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)

    taken: dict[signal.Signals, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    if trainer.world_size > 1:
        taken[signal.SIGINT] = signal.default_int_handler
    try:
        with answered([number for number, usual in taken.items() if signal.getsignal(number) == usual], stop):
            yield
    except SIGTERMException:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if is_started_by_run():
            # With an exit code other than 0, Lightning would kill the first process before it has ended. And an
            # ordinary exit sometimes aborts in threads of torch at the end of the interpreter.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(128 + (received[0] if received else signal.SIGTERM)) from None
    except SystemExit as leaving:
        if isinstance(leaving.__context__, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        raise


def find_early_end(trainer: Trainer) -> str | None:
    """Why a training has ended before its last update, in one line; Lightning's callbacks tell it to its log alone."""
    last = getattr(trainer.lightning_module, "last_update", None)
    if last is None or trainer.global_step >= last:
        return None
    ended = f"ended after update {trainer.global_step} of {last}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and _has_stopped(callback, trainer):
            return f"{ended}: {str(callback.stopping_reason_message).removesuffix(' Signaling Trainer to stop.')}"
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None and left <= 0:
            return f"{ended}: the time of {type(callback).__name__} is over"
    return None


def _has_stopped(callback: EarlyStopping, trainer: Trainer) -> bool:
    """True if early stopping has ended the training; where min_epochs forbade it, the training went on."""
    told = callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED
    return told and trainer.current_epoch <= callback.stopped_epoch + 1


def _leave_terminal() -> None:
    """Write to nowhere what would go to a terminal that is closed: the system refuses it."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class StopTogether(Callback):
    """Makes all processes of a run stop at the same batch when SIGTERM reaches one of them or all.

    SLURM's signal before the end of a job's time, which Lightning answers with a checkpoint, is one more of this kind.
    Lightning 2.6 hangs in two ways. It calls a collective operation in the signal handler while other processes wait in
    another collective, and the first process stops one batch before the others. Here the handler only records the
    signal. The processes agree about it before each training batch, before each validation, and before every tenth
    batch of an evaluation. Batches of evaluated streams are excluded, because their number differs between processes. A
    run of one process stops as Lightning does it, and before a validation.

    In training they stop one batch late, because the answer to a question is read only after the next one is asked.
    So a processor can launch a batch while its GPU works on the one before it.
    """

    def __init__(self) -> None:
        self._told = False
        self._asked: _Answer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1:
            return
        self._asked = None
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = connector._slurm_sigusr_handler_fn = self._note
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: self._agree_late(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and _has_stopped(callback, trainer):
                trainer.should_stop = True  # it had ended the run, which was interrupted before the test

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            self._agree(trainer)
        elif trainer.received_sigterm:
            raise SIGTERMException

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._agree_now_and_then(trainer, batch_idx, trainer.num_val_batches[dataloader_idx])

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._agree_now_and_then(trainer, batch_idx, trainer.num_test_batches[dataloader_idx])

    def _note(self, *_: Any) -> None:
        self._told = True

    def _agree_now_and_then(self, trainer: Trainer, batch_idx: int, batches: float) -> None:
        if trainer.world_size > 1 and batch_idx % 10 == 0 and isinstance(batches, int):
            self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        if trainer.strategy.reduce_boolean_decision(self._told, all=False):
            self._stop()

    def _agree_late(self, trainer: Trainer) -> None:
        before, self._asked = self._asked, _Answer(self._told, trainer.strategy.root_device)
        if before is not None and before.read():
            self._stop()

    def _stop(self) -> None:
        self._told = False  # not before: a signal in the last batch of a training ends the test that follows
        raise SIGTERMException


class _Answer:
    """Whether any process was told to stop. All processes ask; on GPUs asking does not wait for their work."""

    def __init__(self, told: bool, device: torch.device) -> None:
        # filled on the device: a copy from the processor would wait for it
        answer = torch.full((1,), int(told), dtype=torch.int32, device=device)
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX)
        self._answer = answer
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._answer = torch.empty((1,), dtype=torch.int32, pin_memory=True)
            self._answer.copy_(answer, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))

    def read(self) -> bool:
        """Waits until the device has done what it had to do when the question was asked."""
        if self._ready is not None:
            self._ready.synchronize()
        return bool(self._answer.item())
