"""What a run of a classifier reports beside its metrics: the figures of each class, confusion matrices, thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from longseq.tasks.report import Report
from longseq.tasks.training.class_figures import class_table, confusion_table, per_class

# The most classes whose confusion matrix the json file of an evaluation holds.
_MOST_CLASSES = 100


class ClassReport(Report):
    """Adds precision, recall and F1 score of each class, the confusion matrix, and thresholds.

    `unit` is what the samples are called. Modules are those of `longseq.tasks.training.classifier.ClassifierModule`.
    """

    unit: ClassVar[str]
    files = tuple(f"{name}_{split}.csv" for name in ("classes", "confusion_matrix") for split in ("val", "test"))

    def extras(self, module: Any, info: Any, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, counts in ((split, module.confusion_matrix), ("val", module.val_confusion_matrix)):
            if counts is not None and f"{name}/per_class" not in found:
                found[f"{name}/per_class"] = per_class(counts, info.class_names, unit=self.unit)
                if module.num_classes <= _MOST_CLASSES:
                    found[f"{name}/confusion_matrix"] = counts.tolist()
        if module.thresholds is not None:
            found["thresholds"] = dict(zip(_decided(info), module.thresholds.tolist(), strict=True))
        return found

    def tables(self, module: Any, info: Any) -> dict[str, Sequence[Sequence[Any]]]:
        found: dict[str, Sequence[Sequence[Any]]] = {}
        for split, counts in (("val", module.val_confusion_matrix), ("test", module.confusion_matrix)):
            if counts is not None:
                found[f"classes_{split}"] = class_table(per_class(counts, info.class_names, unit=self.unit))
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


def _decided(info: Any) -> list[str]:
    """The names that thresholds are of: all labels, or the second one of two classes."""
    names: list[str] = info.class_names
    return names if info.multi_label else names[1:]
