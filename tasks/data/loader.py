"""Batches, and loaders that continue an epoch exactly where a checkpoint left it."""

from __future__ import annotations

import logging
import queue
import struct
import tarfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from longseq.tasks.data.sampler import EvaluationSampler, UpdateSampler
from longseq.tasks.training.system import prepare_data_worker

_log = logging.getLogger(__name__)

Given = TypeVar("Given")
Made = TypeVar("Made")

# What decoders raise for bytes that are not an image.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    tarfile.TarError,
    Image.DecompressionBombError,
)

# SAME: the sampler's values that determine the order of samples. SPREAD: those that determine how an effective batch is
# divided over processes and accumulated batches.
SAME = ("num_samples", "effective_batch_size", "repeats", "seed")
SPREAD = ("batch_size", "world_size", "accumulate")


class SampleError(Exception):
    """A data set's own error at a sample that names it, where the error does not say that a file is unreadable."""


class Failure(NamedTuple):
    """A sample that could not be read, and the reason; `stops` the run where its label is wrong."""

    path: str
    reason: str
    stops: bool = False


class Batch(NamedTuple):
    """A whole batch: the model's inputs `[B, ...]`, the targets, and the samples that were skipped.

    A loader reports the failures and yields (inputs, targets).
    """

    inputs: Any
    targets: Any
    failures: list[Failure]


def count_units(batch: Any) -> int:
    """The size of a batch of this process in the unit of its task: images, sequences, documents or tokens.

    A batch (inputs, targets), or its inputs, may have the whole number `units`: for packed rows of documents, the
    number of real tokens. Otherwise each row, of the first dimension of the inputs, is a unit.
    """
    for part in (batch, batch[0]):
        if (units := getattr(part, "units", None)) is not None:
            return int(units)
    return len(batch[0])


def count_tokens(batch: Any) -> int:
    """The tokens of a batch whose units are documents, `token_count` of its inputs; 0 of other batches."""
    return getattr(batch[0], "token_count", None) or 0


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
        if getattr(own_sampler, "world_size", None) == 1 and getattr(sampler, "num_replicas", 1) > 1:
            raise ValueError(f"a loader for one process in a run of {sampler.num_replicas}: give the data module")
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

    def __iter__(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        """Start nothing before the first batch is requested: Lightning sets the epoch after it has called iter()."""
        batches = (self.finish or iter)(super().__iter__())
        try:
            for inputs, targets, failures in batches:
                if self.report is not None:
                    self.report(failures)
                else:
                    assert not failures, failures
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
                raise ValueError("no sample of a training batch can be read")
            self._position = (self._position[0], self._position[1] + 1)
            yield inputs, targets

    def state_dict(self) -> dict[str, int]:
        """Integers: the position in the epoch, and the values that determine the order of samples."""
        epoch, batches = self._position
        if self.trained is not None and not self._resuming:
            batches = min(batches, self.trained())
        return {"epoch": epoch, "batches": batches, **self._read_sampler()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the saved position, also with another number of devices or of accumulated batches.

        Raises ValueError if the order of samples would differ.
        """
        then, now = state_dict, self._read_sampler()
        for name in SAME:
            if then[name] != now[name]:
                raise ValueError(f"the checkpoint was trained with {name}={then[name]}, now it is {now[name]}")
        updates, accumulated = divmod(then["batches"], then["accumulate"])
        batches = updates * now["accumulate"] + accumulated
        if any(then[name] != now[name] for name in SPREAD):
            if accumulated:
                raise ValueError("a checkpoint from within an update resumes only with as many devices and batches")
            if then["batch_size"] != now["batch_size"]:
                _log.warning(
                    "%s samples at a time, and %s before: what is drawn for a whole batch (mixing, dropout) differs",
                    now["batch_size"],
                    then["batch_size"],
                )
            if self.respread is not None:
                self.respread(then["accumulate"], now["accumulate"])
        self._position = (then["epoch"], batches)
        self._resuming = True

    def _read_sampler(self) -> dict[str, int]:
        return {name: getattr(self.sampler, name) for name in SAME + SPREAD}


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


def each_loader(given: Any) -> Iterator[Any]:
    """The loaders that a Trainer has: one, or lists and dictionaries of them on any level."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for one in given:
            yield from each_loader(one)
    else:
        yield given


def work_ahead(
    items: Iterator[Given], work: Callable[[Given], Made], stream: torch.cuda.Stream, *, ahead: int
) -> Iterator[Made]:
    """Yields `work(item)` of each item; a thread prepares up to `ahead` of them on a CUDA stream.

    The consumer's stream waits for it. An error in the thread is raised where the item is asked for. The thread ends
    with its consumer, and closes `items`, which may be those of another thread on the same stream.
    """
    ready: queue.SimpleQueue[tuple[Made, torch.cuda.Event] | BaseException | None] = queue.SimpleQueue()
    places, stopped = threading.Semaphore(ahead), threading.Event()

    def produce() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for item in items:
                    made = work(item)
                    ready.put((made, stream.record_event()))
                    places.acquire()
                    if stopped.is_set():
                        break
            ready.put(None)
        except BaseException as error:
            ready.put(error)
        finally:
            if hasattr(items, "close"):
                items.close()

    thread = threading.Thread(target=produce, name="work_ahead", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            made, event = found
            places.release()
            own = torch.cuda.current_stream(stream.device)
            if own != stream:
                own.wait_event(event)
                for tensor in made if isinstance(made, tuple) else ():
                    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                        tensor.record_stream(own)  # keeps its memory until the step is done
            yield made
    finally:
        stopped.set()
        places.release()
        thread.join()


def _as_it_is(batch: Any) -> Any:
    return batch
