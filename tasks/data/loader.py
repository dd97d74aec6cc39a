"""Batches, and loaders that continue an epoch exactly where a checkpoint left it.

Batches of other loaders are pairs, or dictionaries with the names that other libraries give.
"""

import io
import pickle
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler, get_worker_info

from longseq.tasks.data.sampler import UpdateSampler
from longseq.tasks.training.system import prepare_data_worker

Given = TypeVar("Given")
Made = TypeVar("Made")

UNREADABLE = (OSError, ValueError)  # what reading an image raises: the file cannot be opened, or its bytes are no image

# The names of images and targets in the batches of other libraries.
IMAGES = ("images", "image", "pixel_values", "img", "x")
TARGETS = ("labels", "label", "targets", "target", "y")

# The values of a sampler that determine the order of samples, and how an effective batch is divided.
SAME = ("num_samples", "effective_batch_size", "repeats", "seed")
SPREAD = ("batch_size", "world_size", "accumulate")


class Failure(NamedTuple):
    """A sample that could not be read, and the reason; `stops` is True for a wrong label, which ends the run."""

    path: str
    reason: str
    stops: bool = False


class Batch(NamedTuple):
    """The model's inputs `[B, ...]`, the targets, and the samples that were skipped, which a loader reports."""

    inputs: Any
    targets: Any
    failures: list[Failure]


def count_units(batch: Any) -> int:
    """The images, sequences, documents or tokens of a batch.

    It is the attribute `units` of the batch (inputs, targets) or of its inputs, otherwise the number of rows.
    """
    for part in (batch, batch[0]):
        if (units := getattr(part, "units", None)) is not None:
            return int(units)
    return len(batch[0])


def count_tokens(batch: Any) -> int:
    """The tokens of a batch whose units are documents (`token_count` of its inputs); 0 for other batches."""
    return getattr(batch[0], "token_count", None) or 0


def find_entry(batch: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    """The value of the first of `names` that a batch has. KeyError if it has none of them."""
    for name in names:
        if name in batch:
            return batch[name]
    raise KeyError(f"a batch without {what}")


def check_class_numbers(targets: Tensor, num_classes: int) -> None:
    """ValueError for labels `[B]` that are not class numbers; floats may be whole numbers."""
    fits = (targets >= 0) & (targets < num_classes)
    if targets.is_floating_point():
        fits &= targets == targets.round()
    if not bool(fits.all()):
        raise ValueError(f"the label {float(targets[~fits][0]):g} is not among the classes 0 to {num_classes - 1}")


def check_several_labels(targets: Tensor, *, exact: bool) -> None:
    """ValueError for labels `[B, C]` that are not 0 and 1; unless `exact` they may lie between."""
    fits = (targets >= 0) & (targets <= 1)
    if exact:
        fits &= targets == targets.round()
    if not bool(fits.all()):
        raise ValueError(f"a label of a batch is {float(targets[~fits][0]):g}, and neither 0 nor 1")


def read_mask(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """True at the real tokens `[N, T]` of a batch with an `attention_mask`. ValueError for one of another shape."""
    if batch.get("attention_mask") is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    mask: Tensor = batch["attention_mask"].bool()
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask {list(mask.shape)} does not fit the tokens {list(tokens.shape)}")
    return mask


class BatchLoader(DataLoader[Batch]):
    """Yields (inputs, targets) of a data set that makes whole batches.

    `report` gets the samples of each batch that could not be read; without it there may be none. `finish` maps the
    workers' batches to finished ones, as `work_ahead` does. `progress` is for `TrainingLoader`.

    For a prediction, `overfit_batches` and several devices, Lightning makes the loader anew. It passes the attributes
    that are named like arguments, and `sampler`, `shuffle` and `batch_sampler`; `own_sampler` stays the sampler.

    ValueError for a loader for one process in a run of several, where Lightning's sampler would repeat batches.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        own_sampler: Sampler[Any] | None,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        report: Callable[[list[Failure]], None] | None = None,
        finish: Callable[[Iterator[Batch]], Iterator[Batch]] | None = None,
        progress: Any = None,
        sampler: Any = None,
        shuffle: bool = False,
        batch_sampler: None = None,
    ) -> None:
        if getattr(own_sampler, "world_size", None) == 1 and getattr(sampler, "num_replicas", 1) > 1:
            raise ValueError(f"a loader for one process in a run of {sampler.num_replicas}: give the data module")
        self.own_sampler, self.report, self.finish, self.progress = own_sampler, report, finish, progress
        self._repeats_epoch = isinstance(sampler, SequentialSampler)
        super().__init__(
            dataset,
            batch_size=None,
            sampler=own_sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            collate_fn=share_memory,
            worker_init_fn=prepare_data_worker if num_workers else None,
            generator=torch.Generator(),  # leaves the global generator alone
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
    """A BatchLoader whose state, the position in the epoch, Lightning saves.

    `progress` is the Trainer's count of batches: those on which the model was not trained yet are yielded again. It is
    rescaled when a checkpoint continues with another number of accumulated batches.

    With `overfit_batches` Lightning asks for a sequential order: every epoch then has the batches of the first one.
    """

    sampler: UpdateSampler[Any]

    _position = (0, 0)  # epoch, batches that were yielded
    _resuming = False

    def __iter__(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        epoch, batches = self._position
        self.sampler.start = batches if self._resuming and epoch == self.sampler.epoch else 0
        self._resuming = False
        self._position = (self.sampler.epoch, self.sampler.start)
        if self._repeats_epoch:
            self.sampler.set_epoch(0)
        for inputs, targets in super().__iter__():
            self._position = (self._position[0], self._position[1] + 1)
            yield inputs, targets

    def state_dict(self) -> dict[str, int]:
        """The position in the epoch, and the values that determine the order of samples."""
        epoch, batches = self._position
        if self.progress is not None and not self._resuming:
            batches = min(batches, self.progress.current.processed)
        return {"epoch": epoch, "batches": batches, **self._read_sampler()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the saved position, also with another number of devices or accumulated batches.

        ValueError if the order of samples would differ.
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
            for counts in (self.progress.total, self.progress.current) if self.progress is not None else ():
                ready = counts.ready // then["accumulate"] * now["accumulate"]
                # Callbacks save before their batch counts as completed.
                counts.completed = ready - (counts.ready - counts.completed)
                counts.ready = counts.started = counts.processed = ready
        self._position = (then["epoch"], batches)
        self._resuming = True

    def _read_sampler(self) -> dict[str, int]:
        return {name: getattr(self.sampler, name) for name in SAME + SPREAD}


class Place(NamedTuple):
    """The rank of a process among `world_size` processes, and the batches that it accumulates for an update."""

    rank: int = 0
    world_size: int = 1
    accumulate: int = 1


def find_place(trainer: Any) -> Place:
    """The place of this process; without a Trainer it is the only one."""
    if trainer is None:
        return Place()
    return Place(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)


def work_ahead(
    items: Iterator[Given], work: Callable[[Given], Made], stream: torch.cuda.Stream, *, ahead: int
) -> Iterator[Made]:
    """Yields `work(item)` of each item; a thread prepares up to `ahead` of them on a CUDA stream.

    The consumer's stream waits for it. An error in the thread is raised where the item is requested. The thread ends
    with its consumer, and closes `items`, which may come from another thread on the same stream.
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


class _Sharing(pickle.Pickler):
    def persistent_id(self, part: Any) -> Any:
        return part.share_memory_().shape if isinstance(part, Tensor) else None


def share_memory(batch: Given) -> Given:
    """Move the tensors of a batch to shared memory if this process is a data worker; returns the batch.

    Otherwise torch moves them in a thread of the worker, where an error loses the batch and the run waits forever.
    """
    if get_worker_info() is not None:
        _Sharing(io.BytesIO()).dump(batch)
    return batch
