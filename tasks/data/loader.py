"""A data loader that continues an epoch exactly where a checkpoint left it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from longseq.tasks.data.batch import Batch, Failure
from longseq.tasks.data.sampler import EvaluationSampler, UpdateSampler
from longseq.tasks.training.processes import prepare_data_worker

_log = logging.getLogger(__name__)

# SAME: the sampler's values that determine the order of samples. SPREAD: those that determine how an effective batch is
# divided over processes and accumulated batches.
SAME = ("num_samples", "effective_batch_size", "repeats", "seed")
SPREAD = ("batch_size", "world_size", "accumulate")


class BatchLoader(DataLoader[Batch]):
    """Yields (inputs, targets) of a data set that makes whole batches.

    `report` gets the samples of each batch that could not be read; without it there may be none. Workers live as long
    as the loader. `finish` maps the iterator of the workers' batches to that of finished ones, as `work_ahead` does.

    Lightning makes a loader anew for a prediction, for `overfit_batches` and for several devices. It then passes the
    arguments that are attributes of the same names, and `sampler`, `shuffle` and `batch_sampler`. `own_sampler` stays
    the sampler, for no other one gives whole batches. ValueError for a loader for one process in a run of several:
    Lightning's sampler would repeat batches, so that all processes have as many, and figures would count them twice.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        own_sampler: UpdateSampler[Any] | EvaluationSampler | None,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        report: Callable[[list[Failure]], None] | None = None,
        finish: Callable[[Iterator[Batch]], Iterator[Batch]] | None = None,
        sampler: Any = None,
        shuffle: bool = False,
        batch_sampler: None = None,
    ) -> None:
        if _divides(sampler, own_sampler):
            raise ValueError(
                f"a loader for one process is given to a run of {sampler.num_replicas}: give the Trainer the data "
                "module (datamodule=...), which divides the samples"
            )
        self.own_sampler, self.report, self.finish = own_sampler, report, finish
        super().__init__(
            dataset,
            batch_size=None,
            sampler=own_sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            collate_fn=_as_it_is,
            worker_init_fn=prepare_data_worker if num_workers else None,
            generator=torch.Generator(),  # else the loader draws its workers' seed from the global generator
        )
        self._report = report or _refuse
        self._finish = finish or iter

    def __iter__(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        """Start nothing before the first batch is requested: Lightning sets the epoch after it has called iter()."""
        batches = self._finish(super().__iter__())
        try:
            for inputs, targets, failures in batches:
                self._report(failures)
                yield inputs, targets
        finally:
            if isinstance(batches, Generator):
                batches.close()  # ends its thread before the workers get an epoch's next batches to make


class TrainingLoader(BatchLoader):
    """A BatchLoader with the state that Lightning saves: the epoch and the number of its batches that are done.

    `trained` returns the number of batches of the epoch on which the model was trained; a batch that was yielded but
    failed is yielded again. `respread(then, now)` is called if a checkpoint is continued with another number of
    accumulated batches.

    With `overfit_batches` Lightning asks for a sequential order: every epoch then has the batches of the first one.
    """

    sampler: UpdateSampler[Any]

    def __init__(
        self,
        dataset: Dataset[Batch],
        own_sampler: UpdateSampler[Any],
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        report: Callable[[list[Failure]], None] | None = None,
        finish: Callable[[Iterator[Batch]], Iterator[Batch]] | None = None,
        trained: Callable[[], int] | None = None,
        respread: Callable[[int, int], None] | None = None,
        sampler: Any = None,
        shuffle: bool = False,
        batch_sampler: None = None,
    ) -> None:
        self._repeats_epoch = isinstance(sampler, SequentialSampler)
        super().__init__(
            dataset,
            own_sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            report=report,
            finish=finish,
            sampler=sampler,
        )
        self.trained, self.respread = trained, respread
        self._position = (0, 0)  # epoch, batches that were yielded
        self._resuming = False

    def __iter__(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        epoch, batches = self._position
        self.sampler.start = batches if self._resuming and epoch == self.sampler.epoch else 0
        self._resuming = False
        self._position = (self.sampler.epoch, self.sampler.start)
        if self._repeats_epoch:
            self.sampler.set_epoch(0)
        for inputs, targets in super().__iter__():
            if not len(targets):
                raise ValueError("one sample after the other is not readable (see the log): check the training data")
            self._position = (self._position[0], self._position[1] + 1)
            yield inputs, targets

    def state_dict(self) -> dict[str, int]:
        """Integers: the position in the epoch, and the values that determine the order of samples."""
        epoch, batches = self._position
        if self.trained is not None and not self._resuming:
            batches = min(batches, self.trained())
        return {"epoch": epoch, "batches": batches, **self._read_sampler(SAME + SPREAD)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the saved position, also with another number of devices or of accumulated batches.

        Raises ValueError if the order of samples would differ.
        """
        then, now = state_dict, self._read_sampler(SAME + SPREAD)
        for name in SAME:
            if then[name] != now[name]:
                if name == "num_samples":
                    raise ValueError(
                        f"the checkpoint was trained on {then[name]} samples, and there are {now[name]} now: restore "
                        "the data, or begin a new run with its weights by init=FILE"
                    )
                raise ValueError(
                    f"the checkpoint was trained with {name}={then[name]}, now it is {now[name]}: "
                    f"resume with {name}={then[name]}, or start a new run"
                )
        updates, accumulated = divmod(then["batches"], then["accumulate"])
        batches = updates * now["accumulate"] + accumulated
        if any(then[name] != now[name] for name in SPREAD):
            if accumulated:
                raise ValueError(
                    f"the checkpoint was written between two updates ({_spell(then)}): resume it as it was trained, or "
                    "take one that was written after an update"
                )
            if then["batch_size"] != now["batch_size"]:
                _log.warning(
                    "the run was trained with %s and continues with %s: samples keep their order, but what is drawn "
                    "for a batch as a whole (mixing, dropout, drop path) differs from what would have been drawn",
                    _spell(then),
                    _spell(now),
                )
            if self.respread is not None:
                self.respread(then["accumulate"], now["accumulate"])
        self._position = (then["epoch"], batches)
        self._resuming = True

    def _read_sampler(self, names: Sequence[str]) -> dict[str, int]:
        return {name: getattr(self.sampler, name) for name in names}


def each_loader(given: Any) -> Iterator[Any]:
    """The loaders that a Trainer has: one, or lists and dictionaries of them on any level."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for one in given:
            yield from each_loader(one)
    else:
        yield given


def count_repeated(loaders: Any) -> int:
    """The samples that torch's or Lightning's samplers read once more, so that all processes have equally many."""
    repeated = 0
    for loader in each_loader(loaders):
        if isinstance(sampler := _sampler_of(loader), DistributedSampler):
            repeated += max(0, sampler.total_size - len(sampler.dataset))  # type: ignore[arg-type]
    return repeated


def _sampler_of(loader: Any) -> Any:
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return getattr(loader, "sampler", None) if sampler is None else sampler


def _spell(state: Mapping[str, int]) -> str:
    return (
        f"{state['batch_size']} at a time on {state['world_size']} device(s) x {state['accumulate']} accumulated "
        "batch(es)"
    )


def _divides(sampler: Any, own: Any) -> bool:
    """True for Lightning's sampler of a run of several processes, if the loader's own gives a process all batches."""
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas == 1:
        return False
    return getattr(own, "world_size", None) == 1


def _refuse(failures: list[Failure]) -> None:
    assert not failures, failures


def _as_it_is(batch: Any) -> Any:
    return batch
