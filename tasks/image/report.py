"""What a run of image classification reports beside its metrics: the figures of each class, and commands."""

from __future__ import annotations

from longseq.tasks.image import errors, pictures  # noqa: F401  they register the callbacks of this task
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.training.class_report import ClassReport


class ImageReport(ClassReport):
    """Adds to the figures of each class the number of images."""

    unit = "images"
    headline = ("top1", "top5", "accuracy", "f1", "f1_micro", "balanced_accuracy", "average_precision", "loss")

    def counts(self, module: ImageClassifier, info: DataInfo, split: str) -> dict[str, int]:
        counts = module.confusion_matrix
        if counts is None:
            return {}
        # of several labels each matrix has all images
        return {f"{split}/images": int((counts[0] if info.multi_label else counts).sum())}

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq export {checkpoint} format=onnx"]
