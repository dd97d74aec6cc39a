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
from torchmetrics.utilities.data import dim_zero_cat

from longseq.backbones.linear_text import LinearTextClassifier
from longseq.tasks.config import Criterion
from longseq.tasks.document.config import DocumentInfo, LinearModelKeys
from longseq.tasks.document.model import fit_linear, read_documents
from longseq.tasks.training import metrics, targets
from longseq.tasks.training.class_report import ClassReport
from longseq.tasks.training.metrics import Scores, choose_thresholds, decide, update_metrics


class LabelCalibrationError(metrics.ClosedBins, BinaryCalibrationError):
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


def measure(probabilities: Tensor, decisions: Tensor, wanted: Tensor, info: DocumentInfo) -> dict[str, float]:
    """The metrics of every run, for probabilities `[N, C]` and targets in the memory of this process.

    accuracy: the share of documents whose class is right, or all of whose labels are.
    f1_micro, f1_macro: the F1 score over all decisions, and its mean over the classes that documents have or are given.
        With one class a document, the micro average equals the accuracy.
    calibration_error: in 15 bins of equal width by the highest probability, the mean distance between this probability
        and the accuracy (Guo et al., 2017, equation 3); with several labels, between a label's probability and
        frequency.
    average_precision: with several labels, the mean over the labels that documents have.
    """
    scores = {name: make(info.num_classes) for name, make in TABLES[info.multi_label].always.items()}
    for metric in scores.values():
        metric.to(wanted.device).distributed_available_fn = lambda: False  # other processes do not take part
    update_metrics(scores, probabilities, decisions, wanted)
    return {name: float(metric.compute()) for name, metric in scores.items()}


class ScoresByLength(Scores):
    """The metrics of `measure` for each quarter of the documents by length, from q1 (shortest) to q4 (longest)."""

    decisions: list[Tensor]
    lengths: list[Tensor]

    def __init__(self, info: DocumentInfo) -> None:
        super().__init__()
        self.info = info
        self.add_state("decisions", [], dist_reduce_fx="cat")
        self.add_state("lengths", [], dist_reduce_fx="cat")

    def update(self, probabilities: Tensor, targets: Tensor, decisions: Tensor, lengths: Tensor) -> None:  # type: ignore[override]
        """Add documents: probabilities `[N, C]`, targets and decisions as in `measure`, lengths `[N]` in tokens."""
        super().update(probabilities, targets)
        self.decisions.append(decisions)
        self.lengths.append(lengths)

    def compute(self) -> tuple[dict[str, float], dict[str, int], list[int]]:  # type: ignore[override]
        """The metrics, named such as `accuracy_q1`, the documents of each quarter, and the three quartiles in tokens.

        Equal lengths are in the same quarter, so that a quarter may be empty; it then has no entry.
        """
        probabilities, targets = super().compute()
        decisions, lengths = dim_zero_cat(self.decisions), dim_zero_cat(self.lengths)
        shares = torch.tensor([0.25, 0.5, 0.75], device=lengths.device)
        quartiles = lengths.float().quantile(shares, interpolation="lower").to(lengths.dtype)
        quarters = torch.bucketize(lengths, quartiles)
        found: dict[str, float] = {}
        counts: dict[str, int] = {}
        for number in quarters.unique().tolist():
            chosen, name = quarters == number, f"q{number + 1}"
            counts[name] = int(chosen.sum())
            scores = measure(probabilities[chosen], decisions[chosen], targets[chosen], self.info)
            found |= {f"{key}_{name}": value for key, value in scores.items()}
        return found, counts, quartiles.tolist()


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
        """The metrics of `measure` on the test documents, in this process only."""
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
        return measure(probabilities, decisions, given, info)


class DocumentReport(ClassReport):
    """Adds the linear model's metrics, and documents and accuracy by length, to the figures of each class."""

    unit = "documents"
    headline = ("accuracy", "f1_macro", "average_precision", "calibration_error", "loss")

    def extras(self, module: Any, info: DocumentInfo, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {f"{split}/linear_{name}": value for name, value in module.linear_scores.items()}
        if module.documents_by_length is not None:
            found[f"{split}/documents_by_length"] = dict(module.documents_by_length)
            found[f"{split}/length_quartiles"] = list(module.length_quartiles)
        return found | super().extras(module, info, split)

    def counts(self, module: Any, info: DocumentInfo, split: str) -> dict[str, int]:
        return {f"{split}/documents": sum((module.documents_by_length or {}).values())}

    def rows(self, module: Any, info: DocumentInfo) -> list[tuple[str, str]]:
        measured, found = module.trainer.callback_metrics, module.documents_by_length or {}
        quartiles = module.length_quartiles
        bounds = [*(f"up to {length:,}" for length in quartiles), *(f"over {length:,}" for length in quartiles[2:])]
        rows = [
            (
                f"accuracy {bounds[int(name[1]) - 1]} tokens",
                f"{float(measured[f'test/accuracy_{name}']):.4f} of {count:,} documents",
            )
            for name, count in found.items()
        ]
        if scores := module.linear_scores:
            text = f"{scores['accuracy']:.4f} by TF-IDF and logistic regression on the same documents"
            rows.append(("linear model", text))
        return rows + super().rows(module, info)

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
