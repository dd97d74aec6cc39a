"""An end in order where several processes are told to stop."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from longseq.tasks.training.processes import is_started_by_run


@contextmanager
def stoppable() -> Iterator[None]:
    """Leave the program with 143 where SIGTERM ended a training or a test."""
    try:
        yield
    except SIGTERMException:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if is_started_by_run():
            # Lightning kills the first process where one that it started leaves with a code, before it has left itself.
            # And threads of torch, left to the interpreter's end, now and then abort a process that leaves in order.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(143) from None


class StopTogether(Callback):
    """Has all processes of a run stop at one batch when SIGTERM reaches one of them or all.

    Lightning 2.6 calls a collective operation in the signal handler, where other processes wait in another one, and
    lets the first process stop a batch before the others: both hang. Here a signal is only noted; the processes agree
    about it before each training batch, where Lightning asks the first one, and before every tenth of an evaluation
    (not of streams, whose numbers of batches differ). One process alone stops as Lightning has it.
    """

    def __init__(self) -> None:
        self._told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1:
            return
        self._told = False
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = self._note
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: self._agree(trainer)

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
            raise SIGTERMException
