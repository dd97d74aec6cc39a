"""The figures of each class, from a confusion matrix: precision, recall, F1 score and the number of samples."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Table = Sequence[Sequence[Any]]


def per_class(counts: Tensor, class_names: Sequence[str], *, unit: str) -> list[dict[str, Any]]:
    """For each class its precision, recall and F1 score (None where no sample decides them), and its samples.

    `counts` is a confusion matrix `[true, predicted]`, or of several labels `[C, 2, 2]`. `unit` is what the samples are
    called.
    """
    several = counts.ndim == 3
    right = counts[:, 1, 1] if several else counts.diagonal()
    true = counts[:, 1].sum(dim=1) if several else counts.sum(dim=1)
    predicted = counts[:, :, 1].sum(dim=1) if several else counts.sum(dim=0)
    return [
        {
            "class": name,
            "precision": _share(hits, chosen),
            "recall": _share(hits, samples),
            "f1": _share(2 * hits, chosen + samples),
            unit: samples,
        }
        for name, hits, samples, chosen in zip(
            class_names, right.tolist(), true.tolist(), predicted.tolist(), strict=True
        )
    ]


def class_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of `per_class` below their names."""
    return [list(rows[0]), *(["" if value is None else value for value in row.values()] for row in rows)]


def confusion_table(counts: Tensor, class_names: Sequence[str]) -> Table:
    """A confusion matrix with its names: a row for each true class; of several labels a row for each label."""
    if counts.ndim == 3:
        names = ("true_negative", "false_positive", "false_negative", "true_positive")
        return [
            ["label", *names],
            *([name, *row] for name, row in zip(class_names, counts.flatten(1).tolist(), strict=True)),
        ]
    return [["true", *class_names], *([name, *row] for name, row in zip(class_names, counts.tolist(), strict=True))]


def to_csv(table: Table) -> str:
    """A table as csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
