"""What a run of a classifier reports in addition to its metrics: figures of each class, confusions, thresholds."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from longseq.tasks.report import Report

Table = Sequence[Sequence[Any]]

_MOST_CLASSES = 100  # of a confusion matrix in metrics.json


class ClassReport(Report):
    """Adds precision, recall and F1 score of each class, confusion matrix and thresholds of a `ClassifierModule`."""

    unit: ClassVar[str]  # names the samples

    def extras(self, module: Any, info: Any, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, counts in ((split, module.confusion_matrix), ("val", module.val_confusion_matrix)):
            if counts is not None and f"{name}/per_class" not in found:
                found[f"{name}/per_class"] = per_class(counts, info.class_names, unit=self.unit)
                if module.num_classes <= _MOST_CLASSES:
                    found[f"{name}/confusion_matrix"] = counts.tolist()
        if module.thresholds is not None:
            # of all labels, or of the second one of two classes
            decided = info.class_names if info.multi_label else info.class_names[1:]
            found["thresholds"] = dict(zip(decided, module.thresholds.tolist(), strict=True))
        return found

    def tables(self, module: Any, info: Any) -> dict[str, Table]:
        found: dict[str, Table] = {}
        for split, counts in (("val", module.val_confusion_matrix), ("test", module.confusion_matrix)):
            if counts is not None:
                rows = per_class(counts, info.class_names, unit=self.unit)
                values = (["" if value is None else value for value in row.values()] for row in rows)
                found[f"classes_{split}"] = [list(rows[0]), *values]
                found[f"confusion_matrix_{split}"] = confusion_table(counts, info.class_names)
        return found

    def rows(self, module: Any, info: Any) -> list[tuple[str, str]]:
        if module.thresholds is None:
            return []
        values = module.thresholds.tolist()
        if not info.multi_label:
            return [("threshold", f"{info.class_names[1]} from a probability of {values[0]:.4f} on")]
        least, most = f"{min(values):.4f}", f"{max(values):.4f}"
        return [("thresholds", f"labels from a probability of {least}{f' to {most}' * (least != most)} on")]


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


def confusion_table(counts: Tensor, class_names: Sequence[str]) -> Table:
    """A confusion matrix with its names: a row for each true class, or for each of several labels."""
    if counts.ndim == 3:
        head = ["label", "true_negative", "false_positive", "false_negative", "true_positive"]
        counts = counts.flatten(1)
    else:
        head = ["true", *class_names]
    return [head, *([name, *row] for name, row in zip(class_names, counts.tolist(), strict=True))]


def to_csv(table: Table) -> str:
    """A table as csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
