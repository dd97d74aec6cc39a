"""The data modules of tasks, and the inputs of `longseq predict`."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from typing_extensions import Self

from longseq.tasks.commands import Predict
from longseq.tasks.config import read
from longseq.tasks.data.info import STAGES, Info
from longseq.tasks.data.loader import Batch, BatchLoader, TrainingLoader, find_place
from longseq.tasks.data.sampler import EvaluationSampler, SampleIndex, TrainingSampler, UpdateSampler
from longseq.tasks.training.metrics import decide

DECISION = "decision"  # the detail with the label or labels that thresholds decide on
TOP_K = 5  # the default classes of a prediction
NO_DETAILS: Mapping[str, Any] = {}


class Prediction(NamedTuple):
    """The most probable classes of one input, best first; `details` has a value for each of `Inputs.details`."""

    path: str
    classes: list[tuple[str, float]]
    details: Mapping[str, Any] = NO_DETAILS


class Unreadable(NamedTuple):
    """An input that cannot be classified, and the reason."""

    path: str
    reason: str = "unreadable"
    details: Mapping[str, Any] = NO_DETAILS


class Inputs(ABC):
    """The inputs below a path, for a model to classify.

    `details` names the columns of a prediction next to its classes. `unit` names the inputs of a model without a run.
    """

    details: tuple[str, ...] = ()
    unit: str = "files"

    @abstractmethod
    def __init__(self, path: str, info: Any, keys: Predict) -> None:
        """The inputs at a path, for a model whose data has this info. ValueError if there are none."""

    @abstractmethod
    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        """Classify the inputs in their order; the model is in eval mode, and gradients are off."""


def predictions_of(
    inputs: Iterable[tuple[str, Mapping[str, Any]]], logits: Tensor, info: Any, count: int
) -> Iterator[Prediction | Unreadable]:
    """The `count` most probable classes and the decision of each input (path, details), from logits `[B, C]`.

    With several labels or `thresholds` in the info, the detail `decision` has the label or labels that these decide on.
    An input with NaN among its probabilities is unreadable, because NaN has no order.
    """
    names, several, thresholds = info.class_names, info.multi_label, info.thresholds
    probabilities = logits.float().sigmoid() if several else logits.float().softmax(dim=1)
    finite = probabilities.isfinite().all(dim=1).tolist()
    values, classes = (part.tolist() for part in probabilities.topk(min(count, len(names)), dim=1))
    limits = None if thresholds is None else torch.tensor(thresholds)
    decisions = decide(probabilities, limits, multi_label=several).tolist()
    for (path, details), is_finite, row, ranked, decided in zip(
        inputs, finite, values, classes, decisions, strict=True
    ):
        if not is_finite:
            yield Unreadable(path, "the model's scores are not finite (NaN or infinite)", details)
            continue
        best = [(names[index], value) for index, value in zip(ranked, row, strict=True)]
        if several:
            details = {**details, DECISION: [name for name, there in zip(names, decided, strict=True) if there]}
        elif thresholds is not None:
            details = {**details, DECISION: names[decided]}
        yield Prediction(path, best, details)


def decided_details(info: Any) -> tuple[str, ...]:
    """The detail `decision`, unless the most probable class is the decision."""
    return (DECISION,) if info.multi_label or info.thresholds is not None else ()


class TaskData(LightningDataModule, ABC):
    """The data of a task: its loaders, and the info about the data that a model needs.

    The first element of a batch is the model's input `[B, ...]`. A `longseq.tasks.data.loader.TrainingLoader` resumes
    in the middle of an epoch. `SampleData` has all of this for data sets of single samples.

    Attributes:
        batch_size: the size of a device's training batch.
        eval_batch_size: the size of its evaluation batch, by default the same.
        keys_class: the class of the keys of `data`, which may have `eval_batch_size`, `num_workers` and `pin_memory`.
        info_class: the class of `info`; it has `class_names` if the task has `inputs`.
        inputs: the class of the inputs of `longseq predict`; None if the task has no predictions.
    """

    keys_class: ClassVar[type[Any]]
    info_class: ClassVar[type[Info]]
    inputs: ClassVar[type[Inputs] | None] = None

    _info: Any = None  # set by `setup`

    def __init__(self, keys: Any, *, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        self.keys = read(self.keys_class, vars(keys), "data")
        self.batch_size, self.seed = batch_size, seed
        self.eval_batch_size = getattr(self.keys, "eval_batch_size", None) or batch_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> Self:
        """The data module of a configuration, set up."""
        datamodule = cls(read(cls.keys_class, config["data"], "data"), batch_size=batch_size, seed=config["seed"])
        datamodule.setup()
        return datamodule

    @classmethod
    def for_evaluation(
        cls, config: Mapping[str, Any], changes: Mapping[str, Any], *, split: str, trained: Any, batch_size: int
    ) -> Self:
        """The data of a model's training, with `changes` of the keys, to evaluate it on `split` (test or val).

        `trained` is the info of the training's data. ValueError if the model cannot be evaluated on the data.
        """
        return cls.from_config({**config, "data": {**config["data"], **changes}}, batch_size)

    def take_recipe(self, config: Mapping[str, Any], batch_size: int) -> None:
        """Take the batch size and the keys of a recipe that was chosen by the data (see `TaskKeys.choose`)."""
        raise NotImplementedError

    @abstractmethod
    def setup(self, stage: str | None = None) -> None:
        """Open the data; `stage` has no effect, and a second call does nothing."""

    def evaluation_loader(self, stage: str) -> BatchLoader:
        """The samples of val or test."""
        raise NotImplementedError

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_loader("val")

    def test_dataloader(self) -> BatchLoader:
        return self.evaluation_loader("test")

    def predict_dataloader(self) -> Any:
        """For Lightning's `Trainer.predict`: the test samples, in the order of their split.

        Streams of text, whose batches continue each other, keep the order of the evaluation.
        """
        loader = self.test_dataloader()
        sampler: Any = getattr(loader, "own_sampler", None)
        if hasattr(sampler, "keep_order"):
            sampler.keep_order()
        return loader

    def loader_options(self) -> dict[str, Any]:
        """The arguments of a loader that the keys give."""
        pin_memory = getattr(self.keys, "pin_memory", False) and torch.cuda.is_available()
        return {"num_workers": getattr(self.keys, "num_workers", 0), "pin_memory": pin_memory}

    def training_loader(self, batches: Dataset[Batch], sampler: UpdateSampler[Any], **options: Any) -> TrainingLoader:
        """A loader of training batches that resumes in the middle of an epoch."""
        trainer: Any = self.trainer
        progress = None if trainer is None else trainer.fit_loop.epoch_loop.batch_progress
        return TrainingLoader(batches, sampler, **self.loader_options(), progress=progress, **options)

    @property
    def info(self) -> Any:
        """The `Info` for models and checkpoints; available after `setup`."""
        assert self._info is not None, "call setup() first"
        return self._info

    def training_sampler(self) -> UpdateSampler[Any]:
        """The order of the training samples."""
        raise NotImplementedError

    @property
    def batches_per_epoch(self) -> int | None:
        """Training batches of one device in an epoch; None if it is only known during a run."""
        return len(self.training_sampler())

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of an epoch over all devices; None for data without tokens."""
        return None

    @property
    def registered_parts(self) -> list[Any]:
        """Functions and classes of this data that a plug-in may have registered; a checkpoint records their modules."""
        return []


class SampleData(TaskData):
    """Batches of the data sets that `open` returns; their items are pairs (input, target) of tensors or numbers.

    torch's `default_collate` makes batches of items. The order of training is a function of (`seed`, epoch), for any
    number of processes, and a run resumes in the middle of an epoch. An item must be a function of its number only.
    """

    _sets: Mapping[str, Any] | None = None

    @abstractmethod
    def open(self) -> Mapping[str, Dataset[Any]]:
        """The data sets called train, val and test, each with a length of at least 1; `setup` calls this once."""

    @property
    def sizes(self) -> dict[str, int | None]:
        """The number of samples of each split."""
        return {split: len(self._set(split)) for split in STAGES}

    def setup(self, stage: str | None = None) -> None:
        if self._sets is None:
            self._sets = self.open()

    def train_dataloader(self) -> TrainingLoader:
        batches = _Batches(self._set("train"))
        return self.training_loader(batches, self.training_sampler())

    def evaluation_loader(self, stage: str) -> BatchLoader:
        rank, world_size, _ = find_place(self.trainer)
        samples = self._set(stage)
        sampler = EvaluationSampler(len(samples), self.eval_batch_size, rank=rank, world_size=world_size)
        return BatchLoader(_Batches(samples), sampler, **self.loader_options())

    def training_sampler(self) -> TrainingSampler:
        place = find_place(self.trainer)._asdict()
        return TrainingSampler(len(self._set("train")), self.batch_size, seed=self.seed, **place)

    def _set(self, split: str) -> Any:
        assert self._sets is not None, "call setup() first"
        return self._sets[split]


class _Batches(Dataset[Batch]):
    """Maps the numbers of samples to a batch of them."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __getitem__(self, places: Sequence[int | SampleIndex]) -> Batch:
        numbers = [place.position if isinstance(place, SampleIndex) else place for place in places]
        # A process may have no samples of a distributed evaluation: its empty batch needs the shapes of the others.
        inputs, targets = default_collate([self.samples[number] for number in numbers or [0]])
        return Batch(inputs[: len(numbers)], targets[: len(numbers)], [])


def same_root(root: str | Sequence[str] | None, other: str | Sequence[str] | None) -> bool:
    """True for two spellings of the same files or folders, in the same order."""
    listed = ([given] if isinstance(given, str) else given or [] for given in (root, other))
    one, two = ([os.path.realpath(os.path.expanduser(path)) for path in paths] for paths in listed)
    return one == two


def refuse_larger_shares(shares: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """ValueError for a share by which a run would be evaluated on samples that it was trained on.

    Both are keys of `data`, of an evaluation and of the run, which divide the same samples. A value that is not a
    number names separate samples, and a smaller share is a part of the samples that the run set apart.
    """
    for key, share in shares.items():
        if isinstance(share, float) and (not isinstance(run[key], float) or share > run[key]):
            raise ValueError(f"data.{key}={share}: the run was trained on some of these samples")
