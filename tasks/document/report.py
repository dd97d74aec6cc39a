"""Metrics of document classifiers, the linear baseline, and what a run reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError, MulticlassF1Score

from longseq.backbones.linear_text import LinearTextClassifier
from longseq.tasks.config import Criterion
from longseq.tasks.document.config import DocumentInfo, LinearModelKeys
from longseq.tasks.document.model import fit_linear, read_documents
from longseq.tasks.training import metrics, targets
from longseq.tasks.training.class_report import ClassReport
from longseq.tasks.training.metrics import choose_thresholds, decide, update_metrics


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


@targets.register("callback")
class LinearBaseline(Callback):
    """Fits the linear model to the training documents before a run trains, and measures it on the test documents.

    It reads the documents after truncation, and decides by thresholds as the run does (`task.threshold`); its metrics
    are `test/linear_accuracy` and so on. A run with more than `most_documents` training documents leaves it out.
    """

    def __init__(self, most_documents: int = 50_000) -> None:
        self.most_documents = most_documents

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        module: Any = pl_module
        is_linear = isinstance(module.backbone, LinearTextClassifier)
        if is_linear or (data.info.sizes["train"] or 0) > self.most_documents:
            return
        module.linear_scores = self._measure(data, module)
        name = _compared(module)
        print(f"linear model: test/{name} {module.linear_scores[name]:.4f}, TF-IDF and logistic regression", flush=True)

    @torch.inference_mode()
    def _measure(self, data: Any, module: Any) -> dict[str, float]:
        """The metrics of every run on the test documents, in this process only."""
        info, thresholds = data.info, module.thresholds
        criterion: Criterion | None = module.threshold if isinstance(module.threshold, str) else None  # type: ignore[assignment]
        train, validation = (read_documents(data.split(stage)) for stage in ("train", "val"))
        model = fit_linear(train, validation, info, LinearModelKeys())

        def score(stage: str) -> tuple[Tensor, Tensor]:
            """The probabilities, in float64 as in `ClassifierModule.rankable`, and the targets of a split."""
            documents = list(read_documents(data.split(stage)))
            logits = torch.cat([model.score([model.read(tokens)]) for tokens, _ in documents]).double()
            given = torch.as_tensor(np.asarray([target for _, target in documents])).long()
            return logits.sigmoid() if info.multi_label else logits.softmax(dim=1), given

        if criterion is not None:
            probabilities, given = score("val")
            thresholds = choose_thresholds(probabilities.float(), given, criterion, multi_label=info.multi_label)
        probabilities, given = score("test")
        decisions = decide(probabilities.float(), thresholds, multi_label=info.multi_label)
        scores = {name: make(info.num_classes) for name, make in TABLES[info.multi_label].always.items()}
        for metric in scores.values():
            metric.distributed_available_fn = lambda: False  # other processes do not take part
        update_metrics(scores, probabilities, decisions, given)
        return {name: float(metric.compute()) for name, metric in scores.items()}


class DocumentReport(ClassReport):
    """Adds the linear model's metrics to the figures of each class."""

    unit = "documents"
    headline = ("accuracy", "f1_macro", "average_precision", "calibration_error", "loss")

    def extras(self, module: Any, info: DocumentInfo, split: str) -> dict[str, Any]:
        linear = {f"{split}/linear_{name}": value for name, value in module.linear_scores.items()}
        return linear | super().extras(module, info, split)

    def rows(self, module: Any, info: DocumentInfo) -> list[tuple[str, str]]:
        rows = super().rows(module, info)
        if scores := module.linear_scores:
            text = f"{scores['accuracy']:.4f} by TF-IDF and logistic regression on the same documents"
            return [("linear model", text), *rows]
        return rows

    def closing(self, module: Any, info: DocumentInfo) -> str | None:
        if not module.linear_scores:
            return None
        name = _compared(module)
        ahead = module.linear_scores[name] - float(module.trainer.callback_metrics[f"test/{name}"])
        ahead = ahead if module.directions().get(f"test/{name}", True) else -ahead
        return f"the linear model is better on this set by {ahead:.4f} {name}: model=linear" if ahead > 0 else None

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq predict {checkpoint} input=FILE"]


def _compared(module: Any) -> str:
    """The metric that chooses the best checkpoint, or the accuracy if the linear model is not measured by it."""
    name = str(module.metric).rpartition("/")[2]
    return name if name in module.linear_scores else "accuracy"
