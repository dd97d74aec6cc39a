"""The base classes of classifiers and of their reports: metrics by name, thresholds and confusion matrices."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix, MultilabelConfusionMatrix

from longseq.blocks.precision import at_least_float32
from longseq.models import CHECKPOINT_RUN
from longseq.tasks.config import Criterion
from longseq.tasks.report import Report
from longseq.tasks.training.metrics import (
    TABLES,
    MeanLoss,
    Scores,
    Tables,
    choose_thresholds,
    decide,
    make_metrics,
    reads_decisions,
    update_metrics,
)
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training

_MOST_CLASSES = 100  # of a confusion matrix in metrics.json


class ClassifierModule(TrainedModule):
    """A module that gives each sample one of several classes, or with `multi_label` any number of them.

    Means over the classes are over those that a split has. Checkpoints keep the `thresholds` in force. If a validation
    chooses them, its metrics are for these.

    Args:
        chosen_metrics, metric: more metrics of validation and test (see `make_metrics`).
        threshold: the probability from which a label is given, or the second one of two classes: a number, a number for
            each label, or the criterion by which each validation chooses it (see `choose_threshold`).
        thresholds: in force before the first validation has chosen them.
    """

    tables: ClassVar[Mapping[bool, Tables]] = TABLES  # the metrics by name

    # Counts [true class, predicted class], or [C, 2, 2] of several labels, of the last test.
    confusion_matrix: Tensor | None = None

    def __init__(
        self,
        backbone: nn.Module,
        training: Training | None = None,
        *,
        num_classes: int,
        multi_label: bool,
        chosen_metrics: Mapping[str, Any] | None = None,
        metric: str | None = None,
        threshold: float | Sequence[float] | Criterion | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        super().__init__(backbone, training)
        self.num_classes, self.multi_label = num_classes, multi_label
        self.chosen_metrics, self.metric, self.threshold = chosen_metrics, metric, threshold
        options: dict[str, Any] = {"multi_label": multi_label, "chosen": chosen_metrics, "metric": metric}
        self.val_metrics, self.test_metrics = (
            nn.ModuleDict({"loss": MeanLoss(), **make_metrics(num_classes, **options, tables=self.tables)})
            for _ in range(2)
        )
        confusion = MultilabelConfusionMatrix if multi_label else MulticlassConfusionMatrix
        self.confusion: Metric = confusion(num_classes, validate_args=False)
        # no buffer, which an average of the weights would include
        given = (_given_thresholds(one, num_classes, multi_label) for one in (threshold, thresholds))
        self.thresholds: Tensor | None = next((one for one in given if one is not None), None)
        self._criterion: Criterion | None = threshold if isinstance(threshold, str) else None
        self._scores = Scores() if self._criterion else None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities `[N, C]` of logits, in float32 or float64: a softmax, or with `multi_label` sigmoids."""
        logits = at_least_float32(logits)
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=1)

    def rankable(self, logits: Tensor) -> Tensor:
        """`probabilities` in float64, if the device has it, for metrics that rank samples.

        In float32, all logits above 17 have the probability 1: the samples would be equal.
        """
        return self.probabilities(logits if logits.device.type == "mps" else logits.double())

    def decide(self, logits: Tensor) -> Tensor:
        """The classes `[N]` of logits `[N, C]`, or labels `[N, C]`, by the thresholds in force."""
        return decide(self.probabilities(logits), self.thresholds, multi_label=self.multi_label)

    def measure(self, probabilities: Tensor, wanted: Tensor, metrics: Any, stage: str) -> None:
        """Add N samples, 0 or more, to the metrics of a stage, and log them.

        `wanted` are whole numbers: classes `[N]`, or labels `[N, C]`. Decisions are made in float32, as in predictions;
        metrics that rank samples read `probabilities` (see `rankable`).
        """
        if self._scores is None or stage != "val":
            decisions = self._count(metrics, probabilities, wanted)
            if stage == "test" and len(wanted):
                self.confusion.update(decisions, wanted)
            self._log_metrics(metrics, stage)
            return
        # what depends on the threshold is counted after the last batch
        self._scores.update(probabilities.float(), wanted)
        others = {name: metric for name, metric in metrics.items() if not reads_decisions(metric)}
        update_metrics(others, probabilities, wanted, wanted)
        self._log_metrics(others, stage)

    def _count(self, metrics: Mapping[str, Any], probabilities: Tensor, wanted: Tensor) -> Tensor:
        """Add samples to metrics; returns the decisions about them."""
        decisions = decide(probabilities.float(), self.thresholds, multi_label=self.multi_label)
        update_metrics(metrics, probabilities, decisions, wanted)
        return decisions

    def on_validation_epoch_end(self) -> None:
        if self._scores is not None and self._criterion is not None:
            self.thresholds = choose_thresholds(*self._scores.compute(), self._criterion, multi_label=self.multi_label)
            decided = {name: metric for name, metric in self.val_metrics.items() if reads_decisions(metric)}  # type: ignore[arg-type]
            self._count(decided, *self._scores.own())
            self._log_metrics(decided, "val")
            self._scores.reset()

    def on_test_epoch_start(self) -> None:
        self.confusion.reset()

    def on_test_epoch_end(self) -> None:
        self.confusion_matrix = self.confusion.compute().cpu()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.thresholds is not None:
            thresholds = self.thresholds.tolist()
            run = checkpoint.get(CHECKPOINT_RUN) or {}
            if "data" in run:
                checkpoint[CHECKPOINT_RUN] = {**run, "data": {**run["data"], "thresholds": thresholds}}
            checkpoint["thresholds"] = thresholds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if (thresholds := checkpoint.get("thresholds")) is not None:
            self.thresholds = torch.tensor(thresholds)


def _given_thresholds(threshold: Any, num_classes: int, multi_label: bool) -> Tensor | None:
    """The thresholds for `decide`, None without numbers. ValueError if they do not fit the classes."""
    if threshold is None:
        return None
    if not multi_label and num_classes != 2:
        raise ValueError(f"task.threshold={threshold} needs two classes or several labels, not {num_classes} classes")
    if isinstance(threshold, str):
        return None
    places = num_classes if multi_label else 1
    values = [threshold] * places if isinstance(threshold, float | int) else list(threshold)
    if len(values) != places:
        raise ValueError(f"task.threshold has {len(values)} numbers, not {places}")
    return torch.tensor([float(value) for value in values])


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
