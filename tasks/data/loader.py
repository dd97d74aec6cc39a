"""A data loader that continues an epoch exactly where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from longseq.tasks.data.sampler import EvaluationSampler, TrainingSampler
from longseq.tasks.image.datasets import Batch, Failure, StreamBatches
from longseq.tasks.training.processes import prepare_data_worker


class BatchLoader(DataLoader[Batch]):
    """Yields (images, targets) of a data set that makes whole batches, and reports their unreadable images.

    Workers live as long as the loader.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        sampler: TrainingSampler | EvaluationSampler | None,
        *,
        num_workers: int,
        pin_memory: bool,
        report: Callable[[list[Failure]], None],
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            collate_fn=_as_it_is,
            worker_init_fn=prepare_data_worker if num_workers else None,
            generator=torch.Generator(),  # keeps the loader from drawing its workers' seed from the global generator
        )
        self._report = report

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        """Nothing starts before the first batch is asked for: Lightning tells the epoch after it calls iter()."""
        for images, targets, failures in super().__iter__():
            self._report(failures)
            yield images, targets


class TrainingLoader(BatchLoader):
    """A BatchLoader with the state that Lightning saves: the epoch and how many of its batches are done.

    `trained` tells how many batches of the epoch have been trained on; a batch that was handed out but failed is given
    again.
    """

    sampler: TrainingSampler

    def __init__(
        self,
        dataset: Dataset[Batch],
        sampler: TrainingSampler,
        *,
        num_workers: int,
        pin_memory: bool,
        report: Callable[[list[Failure]], None],
        trained: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(dataset, sampler, num_workers=num_workers, pin_memory=pin_memory, report=report)
        self._trained = trained
        self._position = (0, 0)  # epoch, batches handed out
        self._resuming = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        epoch, batches = self._position
        self.sampler.start = batches if self._resuming and epoch == self.sampler.epoch else 0
        self._resuming = False
        self._position = (self.sampler.epoch, self.sampler.start)
        for images, targets in super().__iter__():
            if not len(targets):
                raise ValueError("one image after the other is not readable (see the log): check the training images")
            self._position = (self._position[0], self._position[1] + 1)
            yield images, targets

    def state_dict(self) -> dict[str, int]:
        """Plain integers: where training stands, and what the order of samples depends on."""
        epoch, batches = self._position
        if self._trained is not None and not self._resuming:
            batches = min(batches, self._trained())
        return {"epoch": epoch, "batches": batches, **self._order()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues there. ValueError where another order of samples would follow."""
        for name, value in self._order().items():
            if state_dict[name] != value:
                raise ValueError(
                    f"the checkpoint was trained with {name}={state_dict[name]}, now it is {value}: "
                    f"resume with {name}={state_dict[name]}, or start a new run"
                )
        self._position = (state_dict["epoch"], state_dict["batches"])
        self._resuming = True

    def _order(self) -> dict[str, int]:
        names = ("num_samples", "batch_size", "repeats", "seed", "world_size")
        return {name: getattr(self.sampler, name) for name in names}


class StreamLoader(BatchLoader):
    """A BatchLoader over a stream; training begins each epoch at its start."""

    def __init__(
        self,
        dataset: StreamBatches,
        *,
        num_workers: int,
        pin_memory: bool,
        report: Callable[[list[Failure]], None],
        epoch: Callable[[], int],
    ) -> None:
        dataset.dataset.set_loader_cfg(num_workers=num_workers)
        super().__init__(dataset, None, num_workers=num_workers, pin_memory=pin_memory, report=report)
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        self.dataset.set_epoch(self._epoch())  # type: ignore[attr-defined]
        yield from super().__iter__()

    def __len__(self) -> int:
        stream: Any = self.dataset
        if not stream.training:
            raise TypeError("a stream does not tell how many evaluation batches it gives")
        return len(stream.dataset) // stream.batch_size


def _as_it_is(batch: Any) -> Any:
    return batch
