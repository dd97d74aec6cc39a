"""The data module of a task whose samples are the items of data sets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch.utils.data import Dataset, default_collate

from longseq.tasks.config import read
from longseq.tasks.data.batch import Batch
from longseq.tasks.data.loader import BatchLoader, TrainingLoader
from longseq.tasks.data.module import TaskData
from longseq.tasks.data.place import find_place, follow
from longseq.tasks.data.sampler import EvaluationSampler, SampleIndex, TrainingSampler

Self = TypeVar("Self", bound="SampleData")

SPLITS = ("train", "val", "test")


class SampleData(TaskData):
    """Batches of the data sets that `open` returns; their items are pairs (input, target) of tensors or
    numbers.

    A subclass names the dataclass of its keys as `keys_class`. Of the keys, `eval_batch_size` and `num_workers` are
    read here where the dataclass has them. Items become batches by torch's `default_collate`. The order of training is
    a function of (`seed`, epoch), for any number of processes, and a run resumes in the middle of an epoch. An item
    must be a function of its number alone.
    """

    keys_class: ClassVar[type[Any]]

    def __init__(self, keys: Any, *, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        self.keys = read(self.keys_class, vars(keys), "data")
        self.batch_size, self.seed = batch_size, seed
        self.eval_batch_size = getattr(self.keys, "eval_batch_size", None) or batch_size
        self._workers = getattr(self.keys, "num_workers", 0)
        self._sets: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls: type[Self], config: Mapping[str, Any], batch_size: int) -> Self:
        keys = read(cls.keys_class, config["data"], "data")
        datamodule = cls(keys, batch_size=batch_size, seed=config["seed"])
        datamodule.setup()
        return datamodule

    @abstractmethod
    def open(self) -> Mapping[str, Dataset[Any]]:
        """The data sets called train, val and test, each with a length of at least 1; `setup` calls this once."""

    @property
    def sizes(self) -> dict[str, int | None]:
        """The number of samples of each split."""
        return {split: len(self._set(split)) for split in SPLITS}

    @property
    def batches_per_epoch(self) -> int:
        return len(self._training_sampler())

    def setup(self, stage: str | None = None) -> None:
        """Open the data sets; a second call does nothing."""
        if self._sets is None:
            self._sets = self.open()
            for split, size in self.sizes.items():
                if not size:
                    raise ValueError(f"data.name={self.keys.name} has no sample in its split {split}")

    def train_dataloader(self) -> TrainingLoader:
        batches = _Batches(self._set("train"))
        return TrainingLoader(batches, self._training_sampler(), num_workers=self._workers, **follow(self.trainer))

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: str) -> BatchLoader:
        rank, world_size, _ = find_place(self.trainer)
        samples = self._set(split)
        sampler = EvaluationSampler(len(samples), self.eval_batch_size, rank=rank, world_size=world_size)
        return BatchLoader(_Batches(samples), sampler, num_workers=self._workers)

    def _training_sampler(self) -> TrainingSampler:
        place = find_place(self.trainer)._asdict()
        return TrainingSampler(len(self._set("train")), self.batch_size, seed=self.seed, **place)

    def _set(self, split: str) -> Any:
        assert self._sets is not None, "call setup() first"
        return self._sets[split]


class _Batches(Dataset[Batch]):
    """Maps the places of samples to a batch of them."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __getitem__(self, places: Sequence[int | SampleIndex]) -> Batch:
        numbers = [place.position if isinstance(place, SampleIndex) else place for place in places]
        # The part of a process in a distributed evaluation may be empty; it has the shapes of the others.
        inputs, targets = default_collate([self.samples[number] for number in numbers or [0]])
        return Batch(inputs[: len(numbers)], targets[: len(numbers)], [])
