"""Metrics of document classifiers, over all documents and by length; counted and reduced by torchmetrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import (
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MultilabelExactMatch,
    MultilabelF1Score,
)

from longseq.tasks.training.metrics import (
    ONE_LABEL,
    ONE_LABEL_MORE,
    SEVERAL_LABELS_MORE,
    Make,
    MeanLabelAveragePrecision,
    MeanLabelF1,
    Tables,
    update_metrics,
)

# The bins by the tokens of a document before truncation: up to each number, and above the last one. The tokens of byte
# data are bytes.
LENGTHS = (512, 1024, 4096)
BINS = (*(f"up_to_{length}" for length in LENGTHS), "longer")

_CALIBRATION_BINS = 15

Scores = dict[str, float]


class LabelCalibrationError(BinaryCalibrationError):
    """The calibration error over the decisions about all labels, from `[N, C]`."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.flatten(), target.flatten())


def _make(metric: Callable[..., Metric], **options: Any) -> Make:
    return lambda classes: metric(classes, **options, validate_args=False)


def _make_calibration_error(classes: int) -> Metric:
    return LabelCalibrationError(n_bins=_CALIBRATION_BINS, validate_args=False)


# The metrics of documents by `multi_label`: those that every run has, and those of other classifiers.
TABLES: Mapping[bool, Tables] = {
    False: Tables(
        {
            "accuracy": _make(MulticlassAccuracy, average="micro"),
            "f1_micro": _make(MulticlassF1Score, average="micro"),
            "f1_macro": _make(MulticlassF1Score, average="macro"),
            "calibration_error": _make(MulticlassCalibrationError, n_bins=_CALIBRATION_BINS),
        },
        {name: ONE_LABEL[name] for name in ("top5", "balanced_accuracy")}
        | {name: make for name, make in ONE_LABEL_MORE.items() if name != "calibration_error"},
    ),
    True: Tables(
        {
            "accuracy": _make(MultilabelExactMatch),
            "f1_micro": _make(MultilabelF1Score, average="micro"),
            "f1_macro": MeanLabelF1,
            "calibration_error": _make_calibration_error,
            "average_precision": _make(MeanLabelAveragePrecision),
        },
        SEVERAL_LABELS_MORE,
    ),
}


def make_scores(num_classes: int, multi_label: bool) -> dict[str, Metric]:
    """The metrics of probabilities `[N, C]` against targets: `[N]` classes, or for several labels `[N, C]` of 0 and 1.

    accuracy: the share of documents whose class is right; of several labels, whose labels are all right.
    f1_micro, f1_macro: the F1 score over all decisions, and its mean over the classes that documents have or are given.
        With one class a document, the micro average equals the accuracy.
    calibration_error: the distance between the highest probability and the share of documents whose class has it, in 15
        bins of equal width, weighted by their documents (Guo et al., 2017, equation 3). Of several labels, the
        distance between the probability of a label and its frequency.
    average_precision: of several labels, the mean over those that documents have of the area under precision and
        recall.
    """
    return {name: make(num_classes) for name, make in TABLES[multi_label].always.items()}


class ScoresByLength(nn.Module):
    """The metrics of `make_scores` for each bin of lengths.

    A module, so that its metrics move to the device of the model; none of them is part of a checkpoint.
    """

    def __init__(self, num_classes: int, multi_label: bool) -> None:
        super().__init__()
        self.scores = nn.ModuleDict({name: nn.ModuleDict(make_scores(num_classes, multi_label)) for name in BINS})
        self.counts = nn.ModuleDict({name: SumMetric(nan_strategy="disable") for name in BINS})  # documents

    def update(self, probabilities: Tensor, decisions: Tensor, targets: Tensor, lengths: Tensor) -> None:
        """Add documents: probabilities `[N, C]`, the decisions about them, targets as in `make_scores`, lengths `[N]`
        in tokens.
        """
        bins = torch.bucketize(lengths, torch.tensor(LENGTHS, device=lengths.device))
        for number, name in enumerate(BINS):
            chosen = bins == number
            self.counts[name].update(chosen.sum())  # type: ignore[operator]
            update_metrics(self.scores[name], probabilities[chosen], decisions[chosen], targets[chosen])  # type: ignore[arg-type]

    def compute(self) -> tuple[Scores, dict[str, int]]:
        """The metrics by names such as `accuracy_up_to_512`, and the documents of each bin; without empty bins.

        All processes of a run call it together.
        """
        counts = {name: int(count.compute()) for name, count in self.counts.items()}  # type: ignore[operator]
        found: Scores = {}
        with warnings.catch_warnings():
            # a bin may have no document of a label
            warnings.filterwarnings("ignore", ".*Average precision score for one or more classes.*")
            warnings.filterwarnings("ignore", ".*No positive samples found.*")
            # nor a process any document of a bin: others have it
            warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before")
            for name, scores in self.scores.items():
                if counts[name]:
                    found |= {f"{key}_{name}": float(metric.compute()) for key, metric in scores.items()}  # type: ignore[operator, attr-defined]
        return found, {name: count for name, count in counts.items() if count}

    def reset(self) -> None:
        """Forget all documents."""
        for part in self.modules():
            if isinstance(part, Metric):
                part.reset()
