"""What a run of image classification reports beside its metrics: accuracy by class, and commands."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longseq.tasks.image import errors, pictures  # noqa: F401  they register the callbacks of this task
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.report import Report


class ImageReport(Report):
    """Adds the accuracy of each class, the number of images, and the command that exports."""

    headline = ("top1", "top5", "loss")

    def extras(self, module: ImageClassifier, info: DataInfo, split: str) -> dict[str, Any]:
        counts = module.confusion_matrix
        return {} if counts is None else {f"{split}/per_class": per_class_accuracy(counts, info)}

    def counts(self, module: ImageClassifier, info: DataInfo, split: str) -> dict[str, int]:
        return {} if module.confusion_matrix is None else {f"{split}/images": int(module.confusion_matrix.sum())}

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq export {checkpoint} format=onnx"]


def per_class_accuracy(confusion_matrix: Tensor, info: DataInfo) -> list[dict[str, Any]]:
    """For each class the share of its images that were classified correctly (None without images), and their number."""
    rows = zip(
        info.class_names, confusion_matrix.diagonal().tolist(), confusion_matrix.sum(dim=1).tolist(), strict=True
    )
    return [
        {"class": name, "top1": round(right / images, 4) if images else None, "images": images}
        for name, right, images in rows
    ]
