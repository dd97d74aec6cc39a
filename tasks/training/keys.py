"""The keys that a task reads from a configuration, as dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from longseq.tasks.training.automatic import Choice
from longseq.tasks.training.options import Range

# What a threshold is chosen by (see `longseq.tasks.training.decisions.choose_threshold`).
Criterion = Literal["f1", "balanced_accuracy"]


@dataclass(frozen=True)
class TaskGroup:
    """The keys of `task` that every task has."""

    name: str
    metric: str  # the validation metric that decides which checkpoint is best
    unit: str  # what the samples are called


@dataclass(frozen=True, kw_only=True)
class ClassifierGroup(TaskGroup):
    """The keys of `task` of a classifier; `longseq.tasks.training.classifier.ClassifierModule` explains the threshold.

    `metrics` names more metrics (see `longseq.tasks.training.classification`).
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    threshold: Criterion | Annotated[float, Range(0, below=1)] | Annotated[list[float], Range(0, 1)] | None = None


@dataclass(frozen=True)
class TaskKeys:
    """The dataclasses of the keys that a task reads: of `data`, `recipe.loss`, `recipe.augment`, and of `task` itself.

    None if the task has no such keys.
    """

    data: type
    group: type = TaskGroup
    loss: type | None = None
    augment: type | None = None

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, if keys contradict each other or belong to another task."""
        return

    def choose(self, config: Mapping[str, Any], info: Any | None, parts: int) -> Choice:
        """The values of the recipe's keys that say `auto`, for data with this info.

        `info` is None for the check before the data is open. An effective batch divides over `parts`. ValueError, in
        one line, if the task cannot choose.
        """
        task = config["task"]["name"]
        raise ValueError(f"the recipe says auto, and task={task} chooses no values: give numbers, or another recipe")
