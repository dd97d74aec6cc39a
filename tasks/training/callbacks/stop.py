"""The orderly end of a run on SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C, and by early stopping."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import early_stopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason as Reason
from lightning.pytorch.utilities.exceptions import SIGTERMException

from longseq.tasks.training import targets

_log = logging.getLogger(__name__)


@contextmanager
def stoppable(trainer: Trainer) -> Iterator[None]:
    """Exit with 143 if SIGTERM ended a training or a test, with 129 after SIGHUP and 130 after Ctrl-C.

    SIGHUP, of a closed terminal, counts as SIGTERM unless it is ignored (nohup); so does Ctrl-C of several processes.
    """
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if sys.exc_info()[0] is not None or received:  # the run is ending already
            return
        received.append(number)
        if signal.getsignal(signal.SIGTERM) is stop:  # not Lightning's: no training or test is going on
            raise SystemExit(128 + number)
        if number != signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)

    taken: dict[signal.Signals, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    if trainer.world_size > 1:
        taken[signal.SIGINT] = signal.default_int_handler
    taken = {number: usual for number, usual in taken.items() if signal.getsignal(number) == usual}
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    except SIGTERMException:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        started_by_lightning = int(os.environ.get("LOCAL_RANK") or 0) > 0 and "TORCHELASTIC_RUN_ID" not in os.environ
        if started_by_lightning:
            # With an exit code other than 0, Lightning would kill the first process before it has ended.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(128 + (received[0] if received else signal.SIGTERM)) from None
    except SystemExit as leaving:
        if isinstance(leaving.__context__, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    finally:
        for number, usual in taken.items():
            signal.signal(number, usual)


@targets.register("callback")
class EarlyStopping(early_stopping.EarlyStopping):
    """Lightning's callback after each validation; a resumed run that it had ended goes on with the test."""

    def __init__(self, monitor: str, **options: Any) -> None:
        super().__init__(monitor, check_on_train_epoch_end=False, **options)  # not every epoch has a validation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stopping_reason != Reason.NOT_STOPPED:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stopping_reason_message is not None and trainer.is_global_zero:
            reason = self.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
            line = f"early stopping in epoch {self.stopped_epoch + 1}: {reason}"
            _log.info(line)
            print(line, flush=True)


class StopTogether(Callback):
    """Makes all processes of a run stop at the same batch when SIGTERM reaches any of them.

    SLURM's SIGUSR1 before the end of a job's time does the same. Lightning 2.6 calls a collective operation in its
    signal handler, which can hang, and its agreement before each batch waits for the GPU. Here the handler only records
    the signal. The processes agree before each training batch (and stop one batch later, which keeps the GPU busy),
    before each validation, and before every tenth batch of an evaluation, except streams, where processes have
    different numbers of batches. A single process stops as in Lightning, and before a validation.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._asked: _Answer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            self._asked = None
            # The only private attribute of Lightning that longseq uses: it would wait for the GPU at each batch.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = partial(self._agree_late, trainer)  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handlers, which it restores after the stage."""
        if trainer.world_size > 1:
            signal.signal(signal.SIGTERM, self._record)
            if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:  # of a SLURM job
                signal.signal(signal.SIGUSR1, self._record)

    on_test_start = on_train_start

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            self._agree(trainer)
        elif trainer.received_sigterm:
            raise SIGTERMException

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        batches = (trainer.num_test_batches if trainer.testing else trainer.num_val_batches)[dataloader_idx]
        if trainer.world_size > 1 and batch_idx % 10 == 0 and isinstance(batches, int):
            self._agree(trainer)

    on_test_batch_start = on_validation_batch_start

    def _record(self, *_: Any) -> None:
        self._signalled = True

    def _agree(self, trainer: Trainer) -> None:
        if trainer.strategy.reduce_boolean_decision(self._signalled, all=False):
            self._stop()

    def _agree_late(self, trainer: Trainer) -> None:
        before, self._asked = self._asked, _Answer(self._signalled, trainer.strategy.root_device)
        if before is not None and before.read():
            self._stop()

    def _stop(self) -> None:
        self._signalled = False  # not before: a signal in the last batch of a training ends the test that follows
        raise SIGTERMException


class _Answer:
    """Whether any process received a signal. All processes ask; asking does not wait for a GPU's work."""

    def __init__(self, signalled: bool, device: torch.device) -> None:
        answer = torch.full((1,), int(signalled), dtype=torch.int32, device=device)
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX)
        self._answer = answer
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._answer = torch.empty((1,), dtype=torch.int32, pin_memory=True)
            self._answer.copy_(answer, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))

    def read(self) -> bool:
        if self._ready is not None:
            self._ready.synchronize()
        return bool(self._answer.item())
