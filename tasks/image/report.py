"""What a run of image classification reports beside its metrics: the figures of each class, and commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longseq.tasks.image import errors, pictures  # noqa: F401  they register the callbacks of this task
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.report import Report
from longseq.tasks.training.class_figures import class_table, confusion_table, per_class

# The most classes whose confusion matrix the json file of an evaluation holds.
_MOST_CLASSES = 100


class ImageReport(Report):
    """Adds precision, recall and F1 score of each class, the confusion matrix, thresholds, and the number of images."""

    headline = ("top1", "top5", "accuracy", "f1", "f1_micro", "balanced_accuracy", "average_precision", "loss")

    def extras(self, module: ImageClassifier, info: DataInfo, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, counts in ((split, module.confusion_matrix), ("val", module.val_confusion_matrix)):
            if counts is not None and f"{name}/per_class" not in found:
                found[f"{name}/per_class"] = per_class(counts, info.class_names, unit="images")
                if info.num_classes <= _MOST_CLASSES:
                    found[f"{name}/confusion_matrix"] = counts.tolist()
        if module.thresholds is not None:
            found["thresholds"] = dict(zip(_decided(info), module.thresholds.tolist(), strict=True))
        return found

    def tables(self, module: ImageClassifier, info: DataInfo) -> dict[str, Sequence[Sequence[Any]]]:
        found: dict[str, Sequence[Sequence[Any]]] = {}
        for split, counts in (("val", module.val_confusion_matrix), ("test", module.confusion_matrix)):
            if counts is not None:
                found[f"classes_{split}"] = class_table(per_class(counts, info.class_names, unit="images"))
                found[f"confusion_matrix_{split}"] = confusion_table(counts, info.class_names)
        return found

    def counts(self, module: ImageClassifier, info: DataInfo, split: str) -> dict[str, int]:
        counts = module.confusion_matrix
        if counts is None:
            return {}
        # of several labels each matrix has all images
        return {f"{split}/images": int((counts[0] if info.multi_label else counts).sum())}

    def rows(self, module: ImageClassifier, info: DataInfo) -> list[tuple[str, str]]:
        if module.thresholds is None:
            return []
        values = module.thresholds.tolist()
        if not info.multi_label:
            return [("threshold", f"{info.class_names[1]} from a probability of {values[0]:.4f} on")]
        return [("thresholds", f"labels from a probability of {min(values):.4f} to {max(values):.4f} on")]

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq export {checkpoint} format=onnx"]


def _decided(info: DataInfo) -> list[str]:
    """The names that thresholds are of: all labels, or the second one of two classes."""
    return info.class_names if info.multi_label else info.class_names[1:]
