"""Metrics of document classifiers, over all documents and by length; all of them are those of torchmetrics."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import (
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAveragePrecision,
    MultilabelConfusionMatrix,
    MultilabelExactMatch,
    MultilabelF1Score,
)

# The bins by the tokens of a document before truncation: up to each number, and above the last one. The tokens of byte
# data are bytes.
LENGTHS = (512, 1024, 4096)
BINS = (*(f"up_to_{length}" for length in LENGTHS), "longer")

_CALIBRATION_BINS = 15

Scores = dict[str, float]


def make_scores(num_classes: int, multi_label: bool, *, sync_on_compute: bool = True) -> nn.ModuleDict:
    """The metrics of probabilities `[N, C]` against targets: `[N]` classes, or for several labels `[N, C]` of 0 and 1.

    accuracy: the share of documents whose class is right; of several labels, whose labels are all right.
    f1_micro, f1_macro: the F1 score over all decisions, and its mean over the classes. With one class a document, the
        micro average equals the accuracy.
    calibration_error: the distance between the probability of the chosen class and the share of right choices, in 15
        bins of equal width, weighted by their documents (Guo et al., 2017, equation 3). Of several labels, the
        distance between the probability of a label and its frequency.
    average_precision: of several labels, the mean over the labels of the area under precision and recall.

    Without `sync_on_compute` the metrics are those of the documents of this process alone.
    """
    own: dict[str, Any] = {"validate_args": False, "sync_on_compute": sync_on_compute}
    if not multi_label:
        common: dict[str, Any] = {"num_classes": num_classes, **own}
        return nn.ModuleDict(
            {
                "accuracy": MulticlassAccuracy(average="micro", **common),
                "f1_micro": MulticlassF1Score(average="micro", **common),
                "f1_macro": MulticlassF1Score(average="macro", **common),
                "calibration_error": MulticlassCalibrationError(n_bins=_CALIBRATION_BINS, **common),
            }
        )
    common = {"num_labels": num_classes, **own}
    return nn.ModuleDict(
        {
            "accuracy": MultilabelExactMatch(**common),
            "f1_micro": MultilabelF1Score(average="micro", **common),
            "f1_macro": MultilabelF1Score(average="macro", **common),
            "calibration_error": LabelCalibrationError(n_bins=_CALIBRATION_BINS, **own),
            "average_precision": MultilabelAveragePrecision(average="macro", **common),
        }
    )


def make_confusion_matrix(num_classes: int, multi_label: bool) -> Metric:
    """Counts `[true, predicted]`; of several labels `[C, true, predicted]`, a matrix of 2 by 2 for each label."""
    if multi_label:
        return MultilabelConfusionMatrix(num_classes, validate_args=False)
    return MulticlassConfusionMatrix(num_classes, validate_args=False)


class LabelCalibrationError(BinaryCalibrationError):
    """The calibration error over the decisions about all labels, from `[N, C]`."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.flatten(), target.flatten())


_WITH_LISTS = (LabelCalibrationError, MultilabelAveragePrecision)


class LengthCounts(Metric):
    """The number of documents in each bin of `BINS`, over all batches and processes."""

    full_state_update = False

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.zeros(len(BINS), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, bins: Tensor) -> None:
        """Add documents by the numbers of their bins, `[N]`."""
        self.count += torch.bincount(bins, minlength=len(BINS))

    def compute(self) -> Tensor:
        """The documents of each bin."""
        return self.count


class ScoresByLength(nn.Module):
    """The metrics of `make_scores` for each bin of lengths.

    A module, so that its metrics move to the device of the model; none of them is part of a checkpoint.
    """

    def __init__(self, num_classes: int, multi_label: bool) -> None:
        super().__init__()
        self.scores = nn.ModuleDict({name: make_scores(num_classes, multi_label) for name in BINS})
        self.counts = LengthCounts()

    def update(self, probabilities: Tensor, targets: Tensor, lengths: Tensor) -> None:
        """Add documents: probabilities `[N, C]`, targets as in `make_scores`, lengths `[N]` in tokens."""
        bins = torch.bucketize(lengths, torch.tensor(LENGTHS, device=lengths.device))
        self.counts.update(bins)
        for number, name in enumerate(BINS):
            chosen = bins == number
            update_scores(self.scores[name], probabilities[chosen], targets[chosen])  # type: ignore[arg-type]

    def compute(self) -> tuple[Scores, dict[str, int]]:
        """The metrics by names such as `accuracy_up_to_512`, and the documents of each bin; without empty bins.

        All processes of a run call it together.
        """
        counts = dict(zip(BINS, self.counts.compute().tolist(), strict=True))
        found: Scores = {}
        with warnings.catch_warnings():
            # a bin may have no document of a label
            warnings.filterwarnings("ignore", ".*Average precision score for one or more classes.*")
            warnings.filterwarnings("ignore", ".*No positive samples found.*")
            for name, scores in self.scores.items():
                if counts[name]:
                    found |= {f"{key}_{name}": float(metric.compute()) for key, metric in scores.items()}  # type: ignore[operator, attr-defined]
        return found, {name: count for name, count in counts.items() if count}

    def reset(self) -> None:
        """Forget all documents."""
        for part in self.modules():
            if isinstance(part, Metric):
                part.reset()


def update_scores(scores: Mapping[str, Any], probabilities: Tensor, targets: Tensor) -> None:
    """Add documents, maybe none, to the metrics of `make_scores`; a metric `loss` beside them is left alone.

    Metrics of several labels keep lists. torchmetrics can gather the lists of several processes only if each process
    has the shape and the type of their entries: so these metrics are given empty batches, too. The others refuse them.
    """
    for name, metric in scores.items():
        if name != "loss" and (len(targets) or isinstance(metric, _WITH_LISTS)):
            metric.update(probabilities, targets)
