"""Metrics of document classifiers, the linear baseline, and what a run reports."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import BinaryCalibrationError, MulticlassF1Score

from longseq.backbones.linear_text import LinearTextClassifier
from longseq.tasks.document.config import DocumentInfo, LinearModelKeys
from longseq.tasks.document.model import fit_linear, read_documents
from longseq.tasks.training import metrics, targets
from longseq.tasks.training.class_report import ClassReport
from longseq.tasks.training.metrics import decide, update_metrics

if TYPE_CHECKING:
    from longseq.tasks.document.module import DocumentTask

# Upper bounds of the bins by length, in tokens of a document before truncation.
LENGTHS = (512, 1024, 4096)
BINS = {**{f"up_to_{length}": f"up to {length:,} tokens" for length in LENGTHS}, "longer": "over 4,096 tokens"}


class LabelCalibrationError(BinaryCalibrationError):
    """The calibration error over all labels, from `[N, C]`."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.flatten(), target.flatten())


# The metrics by `multi_label`.
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


def make_scores(num_classes: int, multi_label: bool) -> dict[str, Metric]:
    """The metrics of every run, from probabilities `[N, C]` and targets: classes `[N]`, or labels `[N, C]` of 0 and 1.

    accuracy: the share of documents whose class is right, or all of whose labels are.
    f1_micro, f1_macro: the F1 score over all decisions, and its mean over the classes that documents have or are given.
        With one class a document, the micro average equals the accuracy.
    calibration_error: in 15 bins of equal width by the highest probability, the mean distance between this probability
        and the accuracy (Guo et al., 2017, equation 3); with several labels, between a label's probability and
        frequency.
    average_precision: with several labels, the mean over the labels that documents have.
    """
    return {name: make(num_classes) for name, make in TABLES[multi_label].always.items()}


class ScoresByLength(nn.Module):
    """The metrics of `make_scores` for each bin of lengths; a module, so that they follow the model to its device."""

    def __init__(self, num_classes: int, multi_label: bool) -> None:
        super().__init__()
        self.scores = nn.ModuleDict({name: nn.ModuleDict(make_scores(num_classes, multi_label)) for name in BINS})
        self.counts = nn.ModuleDict({name: SumMetric(nan_strategy="disable") for name in BINS})  # documents

    def update(self, probabilities: Tensor, decisions: Tensor, targets: Tensor, lengths: Tensor) -> None:
        """Add documents: probabilities `[N, C]`, decisions and targets as in `make_scores`, lengths `[N]` in tokens."""
        bins = torch.bucketize(lengths, torch.tensor(LENGTHS, device=lengths.device))
        for number, name in enumerate(BINS):
            chosen = bins == number
            self.counts[name].update(chosen.sum())  # type: ignore[operator]
            update_metrics(self.scores[name], probabilities[chosen], decisions[chosen], targets[chosen])  # type: ignore[arg-type]

    def compute(self) -> tuple[dict[str, float], dict[str, int]]:
        """The metrics, named such as `accuracy_up_to_512`, and the documents of each bin that has some.

        All processes of a run call it together.
        """
        counts = {name: int(count.compute()) for name, count in self.counts.items()}  # type: ignore[operator]
        found: dict[str, float] = {}
        with warnings.catch_warnings():
            # A bin may lack documents of a label, and a process may have no document of a bin.
            warnings.filterwarnings("ignore", ".*Average precision score for one or more classes.*")
            warnings.filterwarnings("ignore", ".*No positive samples found.*")
            warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before")
            for name, scores in self.scores.items():
                if counts[name]:
                    found |= {f"{key}_{name}": float(metric.compute()) for key, metric in scores.items()}  # type: ignore[operator, attr-defined]
        return found, {name: count for name, count in counts.items() if count}

    def reset(self) -> None:
        for part in self.modules():
            if isinstance(part, Metric):
                part.reset()


@targets.register("callback")
class LinearBaseline(Callback):
    """Fits the linear model to the training documents before a run trains, and measures it on the test documents.

    It reads the documents after truncation; its metrics are `test/linear_accuracy` and so on. A run with more than
    `most_documents` training documents leaves it out.
    """

    def __init__(self, most_documents: int = 50_000) -> None:
        self.most_documents = most_documents
        self.scores: dict[str, float] = {}
        self.documents = 0

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(pl_module.backbone, LinearTextClassifier):
            return
        self.documents = data.info.sizes["train"] or 0
        if self.scores or self.documents > self.most_documents:
            return
        model = fit_linear(read_documents(data.split("train")), data.info, LinearModelKeys())
        self.scores = measure(model, read_documents(data.split("test")), data.info)
        name = _compared(pl_module, self.scores)
        print(f"linear model: test/{name} {self.scores[name]:.4f}, TF-IDF and logistic regression", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = state_dict["scores"]


@torch.inference_mode()
def measure(
    model: LinearTextClassifier, documents: Iterable[tuple[Sequence[int], Any]], info: DocumentInfo
) -> dict[str, float]:
    """The metrics of `make_scores` for a linear model on documents (see `fit_linear`), on this process only."""
    scores = make_scores(info.num_classes, info.multi_label)
    for metric in scores.values():
        metric.distributed_available_fn = lambda: False  # other processes do not take part
    listed = list(documents)
    for start in range(0, len(listed), 64):
        part = listed[start : start + 64]
        logits = model.score([model.read(tokens) for tokens, _ in part]).double()  # see ClassifierModule.rankable
        given: Tensor = torch.as_tensor(np.asarray([target for _, target in part])).long()
        probabilities = logits.sigmoid() if info.multi_label else logits.softmax(dim=1)
        update_metrics(scores, probabilities, decide(probabilities, None, multi_label=info.multi_label), given)
    return {name: float(metric.compute()) for name, metric in scores.items()}


class DocumentReport(ClassReport):
    """Adds the linear model's metrics, and documents and accuracy by length, to the figures of each class."""

    unit = "documents"
    headline = ("accuracy", "f1_macro", "average_precision", "calibration_error", "loss")

    def extras(self, module: DocumentTask, info: DocumentInfo, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if (baseline := _baseline(module)) is not None:
            found |= {f"{split}/linear_{name}": value for name, value in baseline.scores.items()}
        if module.documents_by_length is not None:
            found[f"{split}/documents_by_length"] = dict(module.documents_by_length)
        return found | super().extras(module, info, split)

    def counts(self, module: DocumentTask, info: DocumentInfo, split: str) -> dict[str, int]:
        found = module.documents_by_length or {}
        by_length = {f"{split}/documents_{name}": count for name, count in found.items()}
        return {f"{split}/documents": sum(found.values()), **by_length}

    def rows(self, module: DocumentTask, info: DocumentInfo) -> list[tuple[str, str]]:
        measured, found = module.trainer.callback_metrics, module.documents_by_length or {}
        rows = [
            (f"accuracy {BINS[name]}", f"{float(measured[f'test/accuracy_{name}']):.4f} of {count:,} documents")
            for name, count in found.items()
        ]
        if (baseline := _baseline(module)) is not None:
            text = f"not measured with {baseline.documents:,} training documents: train model=linear"
            if baseline.scores:
                text = f"{baseline.scores['accuracy']:.4f} by TF-IDF and logistic regression on the same documents"
            rows.append(("linear model", text))
        return rows + super().rows(module, info)

    def closing(self, module: DocumentTask, info: DocumentInfo) -> str | None:
        if (baseline := _baseline(module)) is None or not baseline.scores:
            return None
        name = _compared(module, baseline.scores)
        ahead = baseline.scores[name] - float(module.trainer.callback_metrics[f"test/{name}"])
        ahead = ahead if module.directions().get(f"test/{name}", True) else -ahead
        return f"the linear model is better on this set by {ahead:.4f} {name}: model=linear" if ahead > 0 else None

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq predict {checkpoint} input=FILE"]


def _compared(module: Any, scores: Mapping[str, float]) -> str:
    """The metric that chooses the best checkpoint, or the accuracy if the linear model is not measured by it."""
    name = str(module.metric).rpartition("/")[2]
    return name if name in scores else "accuracy"


def _baseline(module: DocumentTask) -> LinearBaseline | None:
    """The callback, if the run has it and trains another model."""
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    found = next((callback for callback in callbacks if isinstance(callback, LinearBaseline)), None)
    return found if found is not None and found.documents else None
