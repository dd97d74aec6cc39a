"""The inputs of `longseq predict`, and what a model predicts for them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from longseq.tasks.commands import Predict
from longseq.tasks.training.metrics import decide

_NAMED = 5
DECISION = "decision"  # the detail with what thresholds decide
_TOP_K = 5  # classes that are written of a file if the user does not say
_NONE: Mapping[str, Any] = {}  # no MappingProxyType, which a data worker could not send


class PassedOver(NamedTuple):
    """A file that was not read (or a hidden folder, with a slash at its end), and the reason."""

    path: str
    reason: str


class Prediction(NamedTuple):
    """The most probable classes of one input, best first; `details` has a value for each of `Inputs.details`."""

    path: str
    classes: list[tuple[str, float]]
    details: Mapping[str, Any] = _NONE


class Unreadable(NamedTuple):
    """An input that cannot be classified, and the reason."""

    path: str
    reason: str = "unreadable"
    details: Mapping[str, Any] = _NONE


class Inputs(ABC):
    """What a model classifies below a path.

    `passed_over` lists the files there that are not inputs of the task. `details` names what is written of each input
    beside its classes. `unit` is what inputs are called where the run of the model is not known.
    """

    passed_over: list[PassedOver]
    details: tuple[str, ...] = ()
    unit: str = "files"

    @classmethod
    @abstractmethod
    def open(cls, path: str, info: Any, keys: Predict) -> Self:
        """The inputs at a path, for a model whose data has this info. ValueError if there are none."""

    @abstractmethod
    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        """Classify the inputs in their order; the model is in eval mode, and gradients are off."""

    def notes(self) -> list[str]:
        """Lines for the end of a prediction."""
        return []


class InputFiles(Inputs, Dataset[Any]):
    """The files below a path, each of them one input, built from the path and the info of the model's data.

    They are read in batches by a `DataLoader`. The model gives scores of classes that exclude each other, or of several
    labels where the info has `multi_label`: then all labels are written. Where the info has several labels or
    `thresholds`, the detail `decision` has the label or the labels that these decide on. ValueError if there are no
    inputs.
    """

    info: Any

    @abstractmethod
    def __init__(self, path: str, info: Any) -> None: ...

    @classmethod
    def open(cls, path: str, info: Any, keys: Predict) -> Self:
        inputs = cls(path, info)
        inputs.details = (*cls.details, *decided_details(info))
        return inputs

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def collate(self, items: list[Any]) -> tuple[Tensor, list[str], list[Unreadable]]:
        """A batch `[B, ...]` of items, the paths of its B inputs, and those that cannot be read."""

    def prepare(self, batch: Tensor) -> Tensor:
        """The model's input for a batch, on the device of the batch."""
        return batch

    def score(self, model: nn.Module, batch: Tensor, paths: list[str], keys: Predict) -> Tensor:
        """The logits [B, num_classes] of a prepared batch; a subclass may write what else the keys ask for."""
        return model(batch)

    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        info, device = self.info, next(model.parameters()).device
        several = getattr(info, "multi_label", False)
        most = len(info.class_names) if several else _TOP_K
        loader = DataLoader(self, keys.batch_size, num_workers=keys.num_workers, collate_fn=self.collate)
        for batch, paths, failed in loader:
            if paths:
                logits = self.score(model, self.prepare(batch.to(device)), paths, keys).float()
                probabilities = logits.sigmoid() if several else logits.softmax(dim=1)
                yield from predictions_of(((path, _NONE) for path in paths), probabilities, info, keys.top_k or most)
            yield from failed


def predictions_of(
    inputs: Iterable[tuple[str, Mapping[str, Any]]], probabilities: Tensor, info: Any, count: int
) -> Iterator[Prediction | Unreadable]:
    """The `count` most probable classes and the decision of each input, its path and details, by `[B, C]`.

    NaN has no order: an input with it among its probabilities has no class, and the reason in its place.
    """
    names = info.class_names
    finite = probabilities.isfinite().all(dim=1).tolist()
    values, classes = (part.tolist() for part in probabilities.topk(min(count, len(names)), dim=1))
    decisions = _decisions(probabilities, info)
    for (path, details), is_finite, row, ranked, decision in zip(
        inputs, finite, values, classes, decisions, strict=True
    ):
        if is_finite:
            best = [(names[index], value) for index, value in zip(ranked, row, strict=True)]
            yield Prediction(path, best, {**details, **decision})
        else:
            yield Unreadable(path, "the model's scores are not finite (NaN or infinite)", details)


def decided_details(info: Any) -> tuple[str, ...]:
    """The details that are written of decisions: none where the most probable class is the decision."""
    several, thresholds = getattr(info, "multi_label", False), getattr(info, "thresholds", None)
    return (DECISION,) if several or thresholds is not None else ()


def _decisions(probabilities: Tensor, info: Any) -> list[dict[str, Any]]:
    """The details of `decided_details` of each row of `[B, C]`: a class, or the labels that are there."""
    if not decided_details(info):
        return [{} for _ in probabilities]
    names, several, given = info.class_names, getattr(info, "multi_label", False), getattr(info, "thresholds", None)
    decisions = decide(probabilities, None if given is None else torch.tensor(given), multi_label=several).tolist()
    if several:
        labels = [[name for name, there in zip(names, row, strict=True) if there] for row in decisions]
        return [{DECISION: row} for row in labels]
    return [{DECISION: names[number]} for number in decisions]


def describe_passed_over(passed_over: Sequence[PassedOver], root: str) -> str:
    """How many files were passed over, of which kinds, and the first ones, in one line."""
    kinds = Counter(reason for _, reason in passed_over)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    names = [os.path.relpath(path, root) + "/" * path.endswith("/") for path, _ in passed_over[:_NAMED]]
    return f"{counts}: {', '.join(names)}{', ...' * (len(passed_over) > _NAMED)}"
