"""Metrics of document classifiers, and what a run reports."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError, MulticlassF1Score

from longseq.tasks.training import metrics
from longseq.tasks.training.class_report import ClassReport


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


class DocumentReport(ClassReport):
    """Adds the figures of each class."""

    unit = "documents"
    headline = ("accuracy", "f1_macro", "average_precision", "calibration_error", "loss")

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq predict {checkpoint} input=FILE"]
