"""The data modules of tasks: the interface of all, and one for data sets of single samples."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset, default_collate

from longseq.tasks.config import read
from longseq.tasks.data.info import Info
from longseq.tasks.data.inputs import Inputs
from longseq.tasks.data.loader import Batch, BatchLoader, TrainingLoader, find_place, follow
from longseq.tasks.data.sampler import EvaluationSampler, SampleIndex, TrainingSampler

Self = TypeVar("Self", bound="TaskData")
SampleSelf = TypeVar("SampleSelf", bound="SampleData")

SPLITS = ("train", "val", "test")


class TaskData(LightningDataModule, ABC):
    """The data of a task: its loaders, and what a model must know of the data.

    `batch_size` is the size of a device's training batch, `eval_batch_size` that of its evaluation batch. The first
    element of a batch is the model's input `[B, ...]`. A training loader that can resume in the middle of an epoch is a
    `longseq.tasks.data.loader.TrainingLoader`. `info_class` is the class of `info`. `inputs` is the class of the inputs
    of `longseq predict`, None if the task has no predictions; infos of a task with inputs have `class_names`.

    `SampleData` has all of this for data sets of single samples.
    """

    batch_size: int
    eval_batch_size: int
    info_class: ClassVar[type[Info]]
    inputs: ClassVar[type[Inputs] | None] = None

    @classmethod
    def prepare_process(cls, config: Mapping[str, Any]) -> None:
        """Set what data of this configuration need in a process of the training before it starts CUDA."""

    @classmethod
    @abstractmethod
    def from_config(cls: type[Self], config: Mapping[str, Any], batch_size: int) -> Self:
        """The data module of a configuration, set up."""

    @classmethod
    def for_evaluation(
        cls: type[Self],
        config: Mapping[str, Any],
        changes: Mapping[str, Any],
        *,
        split: str,
        trained: Any,
        batch_size: int,
    ) -> Self:
        """The data for evaluating a trained model: those of its training, with `changes` of their keys.

        `split` (test, val) will be evaluated; `trained` is the info of the model's own data. ValueError if the model
        cannot be evaluated on the data.
        """
        return cls.from_config({**config, "data": {**config["data"], **changes}}, batch_size)

    def take_recipe(self, config: Mapping[str, Any], batch_size: int) -> None:
        """Take the batch, and all that the data reads of a recipe, once that is chosen.

        Called before a loader is made, for tasks that choose a recipe by the data (see `TaskKeys.choose`).
        """
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """For Lightning's `Trainer.predict`: the test samples, in the order of their split.

        That takes a sampler of the loader with a method `keep_order`, as ours have. Streams of text have none: each
        continues its own batch before. Without the method, the samples are in the order in which they are measured.
        """
        loader = self.test_dataloader()
        keep_order = getattr(getattr(loader, "own_sampler", None), "keep_order", None)
        if keep_order is not None:
            keep_order()
        return loader

    @property
    @abstractmethod
    def info(self) -> Any:
        """What models and checkpoints need to know (see `Info`)."""

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int | None:
        """Training batches of one device in an epoch; None if the loader knows it only in a run."""

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of an epoch over all devices; None for data without tokens."""
        return None

    @property
    def registered_parts(self) -> list[Any]:
        """Functions and classes of this data that a plug-in may have registered; a checkpoint records their modules."""
        return []

    @property
    def unreadable(self) -> list[str]:
        """Names of the samples that this process could not read so far."""
        return []


class SampleData(TaskData):
    """Batches of the data sets that `open` returns; their items are pairs (input, target) of tensors or numbers.

    A subclass names the class of its keys as `keys_class`. Of the keys, `eval_batch_size` and `num_workers` are read
    here where the class has them. Items become batches by torch's `default_collate`. The order of training is a
    function of (`seed`, epoch), for any number of processes, and a run resumes in the middle of an epoch. An item must
    be a function of its number alone.
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
    def from_config(cls: type[SampleSelf], config: Mapping[str, Any], batch_size: int) -> SampleSelf:
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


def same_root(root: str | Sequence[str] | None, other: str | Sequence[str] | None) -> bool:
    """True for two spellings of the same files or folders, in the same order."""
    one, two = ([given] if isinstance(given, str) else list(given or []) for given in (root, other))
    return [os.path.realpath(os.path.expanduser(path)) for path in one] == [
        os.path.realpath(os.path.expanduser(path)) for path in two
    ]


def refuse_larger_shares(shares: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise ValueError for a share by which a run would be measured on samples that it was trained on.

    Both are values of the keys of `data` that divide the same samples: of a measurement, and of the run. A value that
    is no number names samples of their own, and a smaller share is a part of what the run set apart.
    """
    for key, share in shares.items():
        if isinstance(share, float) and (not isinstance(run[key], float) or share > run[key]):
            raise ValueError(f"data.{key}={share}: the run was trained on some of these samples")
