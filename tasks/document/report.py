"""Metrics of document classifiers, and what a run reports."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError, MulticlassF1Score

from longseq.tasks.document.config import DocumentInfo
from longseq.tasks.training import metrics
from longseq.tasks.training.classifier import ClassReport


class LabelCalibrationError(metrics.ClosedBins, BinaryCalibrationError):
    """The calibration error over all labels, from `[N, C]`."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.flatten(), target.flatten())


# The metrics by `multi_label`:
# accuracy: the share of documents whose class is right, or all of whose labels are.
# f1_micro, f1_macro: the F1 score over all decisions, and its mean over the classes that documents have or are given.
#     With one class a document, the micro average equals the accuracy.
# calibration_error: in 15 bins of equal width by the highest probability, the mean distance between this probability
#     and the accuracy (Guo et al., 2017, equation 3); with several labels, between a label's probability and frequency.
# average_precision: with several labels, the mean over the labels that documents have.
_ONE, _SEVERAL = metrics.ONE_LABEL, metrics.SEVERAL_LABELS
TABLES: Mapping[bool, metrics.Tables] = {
    False: metrics.Tables(
        {
            "accuracy": _ONE["top1"],
            "f1_micro": lambda classes: MulticlassF1Score(classes, average="micro", validate_args=False),
            "f1_macro": _ONE["f1"],
            "calibration_error": metrics.ONE_LABEL_MORE["calibration_error"],
        },
        {**metrics.ONE_LABEL_MORE, "top5": _ONE["top5"], "balanced_accuracy": _ONE["balanced_accuracy"]},
    ),
    True: metrics.Tables(
        {
            "accuracy": _SEVERAL["accuracy"],
            "f1_micro": _SEVERAL["f1_micro"],
            "f1_macro": _SEVERAL["f1"],
            "calibration_error": lambda classes: LabelCalibrationError(n_bins=15, validate_args=False),
            "average_precision": _SEVERAL["average_precision"],
        },
        metrics.SEVERAL_LABELS_MORE,
    ),
}


class AccuracyByLength(metrics.Scores):
    """The accuracy for each quarter of the documents by length, from q1 (shortest) to q4 (longest).

    `update` adds whether the class `[N]` or each label `[N, C]` of documents is right, and lengths `[N]` in tokens.
    """

    def compute(self) -> Any:
        """The accuracy and the number of documents of each quarter, and the three quartiles in tokens.

        Equal lengths are in the same quarter, so that a quarter may be empty; it then has no entry.
        """
        right, lengths = super().compute()
        right = right if right.ndim == 1 else right.all(dim=1)
        shares = torch.tensor([0.25, 0.5, 0.75], device=lengths.device)
        quartiles = lengths.float().quantile(shares, interpolation="lower").to(lengths.dtype)
        quarters = torch.bucketize(lengths, quartiles)
        parts = {f"q{number + 1}": right[quarters == number] for number in quarters.unique().tolist()}
        accuracies = {name: float(part.double().mean()) for name, part in parts.items()}
        return accuracies, {name: len(part) for name, part in parts.items()}, quartiles.tolist()


class DocumentReport(ClassReport):
    """Adds the accuracy by length to the figures of each class."""

    unit = "documents"
    headline = ("accuracy", "f1_macro", "average_precision", "calibration_error", "loss")

    def extras(self, module: Any, info: DocumentInfo, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if module.documents_by_length is not None:
            found[f"{split}/documents_by_length"] = dict(module.documents_by_length)
            found[f"{split}/length_quartiles"] = list(module.length_quartiles)
        return found | super().extras(module, info, split)

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq predict {checkpoint} input=FILE"]
