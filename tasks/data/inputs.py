"""The inputs of `longseq predict`, and what a model predicts for them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from longseq.tasks.commands import Predict
from longseq.tasks.training.decisions import decide

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
        """The inputs at a path, for a model whose data has this info.

        ValueError, in one line, if there are none, or if a key is for inputs of another kind.
        """

    @abstractmethod
    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        """Classify the inputs in their order; the model is in eval mode, and gradients are off."""

    def notes(self) -> list[str]:
        """Lines for the end of a prediction, such as the memory that it took."""
        return []


class InputFiles(Inputs, Dataset[Any]):
    """The files below a path, each of them one input, built from the path and the info of the model's data.

    They are read in batches by a `DataLoader`. The model gives scores of classes that exclude each other, or of several
    labels where the info has `multi_label`: then all labels are written. Where the info has several labels or
    `thresholds`, the detail `decision` has the label or the labels that these decide on. ValueError if there are no
    inputs.
    """

    info: Any
    draws_saliency: ClassVar[bool] = False  # True if `score` heeds the keys of saliency

    @abstractmethod
    def __init__(self, path: str, info: Any) -> None: ...

    @classmethod
    def open(cls, path: str, info: Any, keys: Predict) -> Self:
        for name in ("column", "truncation", "segment"):
            if (value := getattr(keys, name)) is not None:
                raise ValueError(
                    f"{name}={value} is for documents, and this model classifies other files: leave it out"
                )
        if keys.saliency is not None and not cls.draws_saliency:
            raise ValueError(f"saliency={keys.saliency} draws images, and this model classifies others: leave it out")
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
                yield from tell_predictions(((path, _NONE) for path in paths), probabilities, info, keys.top_k or most)
            yield from failed


def tell_predictions(
    inputs: Iterable[tuple[str, Mapping[str, Any]]], probabilities: Tensor, info: Any, count: int
) -> Iterator[Prediction | Unreadable]:
    """The `count` most probable classes and the decision of each input, its path and details, by `[B, C]`.

    NaN has no order: an input with it among its probabilities has no class, and is told with the reason.
    """
    finite = probabilities.isfinite().all(dim=1).tolist()
    ranked, decisions = rank(probabilities, info.class_names, count), tell_decisions(probabilities, info)
    for (path, details), is_finite, classes, decision in zip(inputs, finite, ranked, decisions, strict=True):
        if is_finite:
            yield Prediction(path, classes, {**details, **decision})
        else:
            yield Unreadable(path, "the model's scores are not finite (NaN or infinite)", details)


def decided_details(info: Any) -> tuple[str, ...]:
    """The details that are written of decisions: none where the most probable class is the decision."""
    several, thresholds = getattr(info, "multi_label", False), getattr(info, "thresholds", None)
    return (DECISION,) if several or thresholds is not None else ()


def tell_decisions(probabilities: Tensor, info: Any) -> list[dict[str, Any]]:
    """The details of `decided_details` of each row of `[B, C]`: a class, or the labels that are there."""
    if not decided_details(info):
        return [{} for _ in probabilities]
    names, several, given = info.class_names, getattr(info, "multi_label", False), getattr(info, "thresholds", None)
    decisions = decide(probabilities, None if given is None else torch.tensor(given), multi_label=several)
    if several:
        told: list[Any] = [
            [name for name, there in zip(names, row, strict=True) if there] for row in decisions.tolist()
        ]
    else:
        told = [names[number] for number in decisions.tolist()]
    return [{DECISION: one} for one in told]


def rank(probabilities: Tensor, class_names: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
    """The most probable classes of each row of `[B, C]`, best first."""
    values, classes = probabilities.topk(min(count, len(class_names)), dim=1)
    return [
        [(class_names[index], value) for index, value in zip(indices, row, strict=True)]
        for indices, row in zip(classes.tolist(), values.tolist(), strict=True)
    ]


def describe_passed_over(passed_over: Sequence[PassedOver], root: str) -> str:
    """Describe in one line how many files were passed over, of which kinds, and the first ones."""
    kinds = Counter(reason for _, reason in passed_over)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_NAMED))
    rest = sum(count for _, count in kinds.most_common()[_NAMED:])
    names = [os.path.relpath(path, root) + "/" * path.endswith("/") for path, _ in passed_over[:_NAMED]]
    more = ", ..." if len(passed_over) > _NAMED else ""
    return f"{counts}{f', {rest} others' if rest else ''}: {', '.join(names)}{more}"
