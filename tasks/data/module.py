"""The interface of every task's data module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from lightning.pytorch import LightningDataModule

from longseq.tasks.config import spell
from longseq.tasks.data.info import Info
from longseq.tasks.data.inputs import Inputs

Self = TypeVar("Self", bound="TaskData")


class TaskData(LightningDataModule, ABC):
    """The data of a task: its loaders, and what a model must know of the data.

    `batch_size` is the size of a device's training batch, `eval_batch_size` that of its evaluation batch. The first
    element of a batch is the model's input `[B, ...]`. A training loader that can resume in the middle of an epoch is a
    `longseq.tasks.data.loader.TrainingLoader`. `info_class` is the class of `info`. `inputs` is the class of the inputs
    of `longseq predict`, None if the task has no predictions; infos of a task with inputs have `class_names`.

    `longseq.tasks.data.samples.SampleData` has all of this for data sets of single samples.
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
        """The data module of a configuration, set up. ValueError, in one line, for errors that the user can correct."""

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
        raise NotImplementedError(f"{type(self).__name__} has no part in the choice of a recipe")

    def keep_classes(self, trained: Any) -> None:
        """Number the classes as the data of `trained`, the info of a run that goes on, where they are the same ones.

        A version before may have sorted them otherwise. Without a part in it, the resumed run is refused then.
        """

    def predict_dataloader(self) -> Any:
        """For Lightning's `Trainer.predict`: the test samples, in the order of their split.

        That takes a sampler of the loader with a method `keep_order`, as ours have, because nothing else tells which
        sample a prediction is of. Streams of text have none: each continues its own batch before. Without the method,
        the samples are in the order in which they are measured.
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
        """Training batches of one device in an epoch; None if only its loader tells it, in a run."""

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of an epoch over all devices; None for data without tokens."""
        return None

    @property
    def registered_parts(self) -> list[Any]:
        """Functions and classes of this data that a plug-in may have registered; a checkpoint records their modules."""
        return []

    @property
    def files(self) -> dict[str, list[str]]:
        """The files of each stage of a run (train, val, test) whose samples are files of their own, where checksums do
        not tell of their content. Those that are too many to look at are left out.
        """
        return {}

    @property
    def unreadable(self) -> list[str]:
        """Names of the samples that this process could not read so far."""
        return []


def refuse_training_keys(changes: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError, in one line, if `changes` to the data of an evaluation have a key that training alone reads."""
    for key in names:
        if key in changes:
            raise ValueError(f"data.{key}={spell(changes[key])} has no effect: it is of training alone; leave it out")
