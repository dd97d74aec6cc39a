"""What a run of a classifier reports in addition to its metrics: figures of each class, confusions, thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from longseq.tasks.report import Report

_MOST_CLASSES = 100  # of a confusion matrix in metrics.json


class ClassReport(Report):
    """Adds precision, recall and F1 score of each class, confusion matrix and thresholds of a `ClassifierModule`."""

    unit: ClassVar[str]  # names the samples

    def extras(self, module: Any, info: Any, split: str) -> dict[str, Any]:
        counts = module.confusion_matrix
        found: dict[str, Any] = {f"{split}/per_class": per_class(counts, info.class_names, unit=self.unit)}
        if module.num_classes <= _MOST_CLASSES:
            found[f"{split}/confusion_matrix"] = counts.tolist()
        if module.thresholds is not None:
            # of all labels, or of the second one of two classes
            decided = info.class_names if info.multi_label else info.class_names[1:]
            found["thresholds"] = dict(zip(decided, module.thresholds.tolist(), strict=True))
        return found

    def counts(self, module: Any, info: Any, split: str) -> dict[str, int]:
        counts = module.confusion_matrix
        # with several labels, each matrix counts all samples
        return {f"{split}/{self.unit}": int((counts[0] if info.multi_label else counts).sum())}


def per_class(counts: Tensor, class_names: Sequence[str], *, unit: str) -> list[dict[str, Any]]:
    """Precision, recall and F1 score of each class (None if undefined), and its number of samples under `unit`.

    `counts` is a confusion matrix `[true, predicted]`, or of several labels `[C, 2, 2]`.
    """
    several = counts.ndim == 3
    right = counts[:, 1, 1] if several else counts.diagonal()
    true = counts[:, 1].sum(dim=1) if several else counts.sum(dim=1)
    predicted = counts[:, :, 1].sum(dim=1) if several else counts.sum(dim=0)
    counted = zip(class_names, right.tolist(), true.tolist(), predicted.tolist(), strict=True)
    return [
        {
            "class": name,
            "precision": _share(hits, chosen),
            "recall": _share(hits, samples),
            "f1": _share(2 * hits, chosen + samples),
            unit: samples,
        }
        for name, hits, samples, chosen in counted
    ]


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
