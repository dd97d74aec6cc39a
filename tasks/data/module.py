"""What every task's data module has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from lightning.pytorch import LightningDataModule

from longseq.tasks.data.inputs import InputFiles

Self = TypeVar("Self", bound="TaskData")


class Info(Protocol):
    """What a model, a checkpoint and an exported file must know of the data."""

    @property
    def sizes(self) -> dict[str, int | None]:
        """Samples of each split, None where a stream does not tell."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for checkpoints."""

    def describe(self) -> str:
        """The data in a few words."""


class TaskData(LightningDataModule, ABC):
    """The data of a task: loaders, and what a model must know of the data.

    `batch_size` is what one device takes in a step, `eval_batch_size` what it takes when it only measures. The first
    element of a batch is what the model reads, `[B, ...]`. A training loader that resumes in the middle of an epoch is
    a `longseq.tasks.data.loader.TrainingLoader`. `inputs` is the class of the files that `longseq predict` gives to a
    model, None where the task predicts nothing; the infos of a task with inputs have `class_names`.
    """

    batch_size: int
    eval_batch_size: int
    inputs: ClassVar[type[InputFiles] | None] = None

    @classmethod
    @abstractmethod
    def from_config(cls: type[Self], config: Mapping[str, Any], batch_size: int) -> Self:
        """The data module of a configuration, set up. ValueError, in one line, for what the user can mend."""

    @classmethod
    @abstractmethod
    def read_info(cls, values: Mapping[str, Any]) -> Info:
        """The inverse of `Info.to_dict`; keys of others are ignored."""

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
        """The data on which a trained model is measured: that of its training with `changes` of its keys.

        `split` (test, val) is what will be measured, `trained` the info of the model's own data. ValueError where the
        model cannot be measured on the data.
        """
        return cls.from_config({**config, "data": {**config["data"], **changes}}, batch_size)

    @property
    @abstractmethod
    def info(self) -> Any:
        """What models and checkpoints need to know (see `Info`)."""

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int:
        """Training batches that one device takes in an epoch."""

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of an epoch over all devices, None of data that has none."""
        return None

    @property
    def registered_parts(self) -> list[Any]:
        """Functions and classes that a plug-in may have registered and that make this data: a checkpoint names them."""
        return []

    @property
    def unreadable(self) -> list[str]:
        """Names of the samples that this process could not read so far."""
        return []
