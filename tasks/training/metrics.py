"""Metrics of all tasks, metrics of classifiers by name, and decisions by thresholds."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics import classification as tm
from torchmetrics.functional.classification import binary_auroc, binary_average_precision
from torchmetrics.utilities.data import dim_zero_cat

from longseq.tasks.config import Criterion
from longseq.tasks.training import targets
from longseq.tasks.training.targets import METRICS

Make = Callable[[int], Metric]

LOSS = "loss"

HALF = 0.5  # the threshold of labels without one of their own

_OWN: dict[str, Any] = {"validate_args": False}

# Metrics that read decisions. The others read probabilities.
_DECIDED = (
    tm.BinaryConfusionMatrix,
    tm.BinaryStatScores,
    tm.MulticlassConfusionMatrix,
    tm.MulticlassStatScores,
    tm.MultilabelConfusionMatrix,
    tm.MultilabelExactMatch,
    tm.MultilabelStatScores,
)


class WeightedMean(Metric):
    """The weighted mean of values, over all batches and processes; use `MeanLoss` or `MeanScore`.

    torchmetrics' MeanMetric cannot replace it: its check for NaN waits for the device; without, it ignores the weights.
    """

    full_state_update = False

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: Any = 1) -> None:
        """Add one value, a scalar, with its weight."""
        # Not in place: a state that `Trainer.validate` has reset, in torch's inference mode, is used by a later fit.
        self.total = self.total + value.float() * weight
        self.weight = self.weight + weight

    def compute(self) -> Tensor:
        """The mean; NaN without values."""
        return self.total / self.weight


class MeanLoss(WeightedMean):
    """A weighted mean for which lower is better."""

    higher_is_better = False


class MeanScore(WeightedMean):
    """A weighted mean for which higher is better, such as an accuracy."""

    higher_is_better = True


class _MeanOfShares:
    """The mean of a score of decisions over the classes of samples, or with `predicted` also over those predicted."""

    predicted = False
    _final_state: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]

    def __init__(self, classes: int) -> None:
        super().__init__(classes, average="none", **_OWN)  # type: ignore[call-arg]

    def compute(self) -> Tensor:
        scores = super().compute()  # type: ignore[misc]
        tp, fp, _, fn = self._final_state()
        return scores[(tp + fn + fp if self.predicted else tp + fn) > 0].mean()


class MeanRecall(_MeanOfShares, tm.MulticlassRecall):
    """The mean recall over the classes that have samples: the balanced accuracy.

    torchmetrics counts a class without samples as 0 as soon as a model predicts it.
    """


class MeanLabelRecall(_MeanOfShares, tm.MultilabelRecall):
    """The mean recall over the labels that a sample has."""


class MeanLabelPrecision(_MeanOfShares, tm.MultilabelPrecision):
    """The mean precision over the labels that a sample has or is given; one that is only given counts as 0."""

    predicted = True


class MeanLabelF1(_MeanOfShares, tm.MultilabelF1Score):
    """The mean F1 score over the labels that a sample has or is given; scikit-learn's with `zero_division=nan`."""

    predicted = True


class Scores(Metric):
    """Keeps two tensors of samples, such as probabilities and targets, until after the last batch."""

    full_state_update = False

    probabilities: list[Tensor]
    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("probabilities", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, probabilities: Tensor, targets: Tensor) -> None:
        """Add samples, maybe none; every process must call it."""
        self.probabilities.append(probabilities)
        self.targets.append(targets)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Probabilities and targets of all processes."""
        return dim_zero_cat(self.probabilities), dim_zero_cat(self.targets)

    def own(self) -> tuple[Tensor, Tensor]:
        """Probabilities and targets of this process."""
        return torch.cat(list(self.probabilities)), torch.cat(list(self.targets))


class MeanOfRanks(Scores):
    """The mean of a score of ranked probabilities over the classes that samples have.

    Args:
        score: of probabilities `[N]` and targets `[N]` of 0 and 1.
        needs_others: whether it also needs samples without the class.
    """

    higher_is_better = True

    def __init__(self, score: Callable[..., Tensor], *, needs_others: bool = False) -> None:
        super().__init__()
        self.score, self.needs_others = score, needs_others

    def compute(self) -> Any:
        probabilities, wanted = super().compute()
        scores = []
        for number, ranked in enumerate(probabilities.T):
            there = wanted == number if wanted.ndim == 1 else wanted[:, number] > 0
            if there.any() and not (self.needs_others and there.all()):
                scores.append(self.score(ranked, there.long(), **_OWN))
        return torch.stack(scores).mean() if scores else probabilities.new_full((), torch.nan)


class ClosedBins:
    """Counts a probability of 1 in the last bin of a calibration error; torchmetrics 1.9 gives it a bin of its own."""

    confidences: list[Tensor]

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds, target)  # type: ignore[misc]
        new = self.confidences[-1]
        self.confidences[-1] = new.clamp(max=1 - torch.finfo(new.dtype).eps / 2)  # the largest number below 1


class CalibrationError(ClosedBins, tm.MulticlassCalibrationError):
    """The calibration error of the likeliest class."""


_FIRST = 5  # classes, among which the accuracy top5 seeks the right one


def _make(metric: Callable[..., Metric], **options: Any) -> Make:
    return partial(metric, **options, **_OWN)


# Averages are macro: over the classes of the samples. In f1 and precision, classes that are only predicted count as 0.
ONE_LABEL: Mapping[str, Make] = {
    "top1": _make(tm.MulticlassAccuracy, average="micro"),
    "top5": _make(tm.MulticlassAccuracy, top_k=_FIRST, average="micro"),
    "f1": _make(tm.MulticlassF1Score, average="macro"),
    "balanced_accuracy": MeanRecall,
}
ONE_LABEL_MORE: Mapping[str, Make] = {
    "f1_weighted": _make(tm.MulticlassF1Score, average="weighted"),
    "precision": _make(tm.MulticlassPrecision, average="macro"),
    "recall": MeanRecall,
    "auroc": lambda _: MeanOfRanks(binary_auroc, needs_others=True),
    "average_precision": lambda _: MeanOfRanks(binary_average_precision),
    "calibration_error": _make(CalibrationError),
    "cohen_kappa": _make(tm.MulticlassCohenKappa),
    "matthews": _make(tm.MulticlassMatthewsCorrCoef),
}
SEVERAL_LABELS: Mapping[str, Make] = {
    "accuracy": _make(tm.MultilabelExactMatch),
    "f1": MeanLabelF1,
    "f1_micro": _make(tm.MultilabelF1Score, average="micro"),
    "average_precision": lambda _: MeanOfRanks(binary_average_precision),
}
SEVERAL_LABELS_MORE: Mapping[str, Make] = {
    "f1_weighted": _make(tm.MultilabelF1Score, average="weighted"),
    "precision": MeanLabelPrecision,
    "recall": MeanLabelRecall,
    "auroc": lambda _: MeanOfRanks(binary_auroc, needs_others=True),
}


class Tables(NamedTuple):
    """The metrics of a task by name: of every run, and only on request (`task.metrics`)."""

    always: Mapping[str, Make]
    more: Mapping[str, Make]


# By `multi_label`.
TABLES: Mapping[bool, Tables] = {
    False: Tables(ONE_LABEL, ONE_LABEL_MORE),
    True: Tables(SEVERAL_LABELS, SEVERAL_LABELS_MORE),
}


def check_metrics(
    metric: str, chosen: Mapping[str, Any], *, multi_label: bool, tables: Mapping[bool, Tables] = TABLES
) -> None:
    """Raise ValueError for unknown names in `chosen` (`task.metrics`) and `metric` (`task.metric`)."""
    always, more = tables[multi_label]
    known = [LOSS, *always, *more, *(name for name, node in chosen.items() if isinstance(node, Mapping))]
    for name in (*(name for name, node in chosen.items() if node is True), metric.rpartition("/")[2]):
        if name not in known:
            raise ValueError(f"{name} names no metric: choose one of {', '.join(dict.fromkeys(known))}")


def make_metrics(
    num_classes: int,
    *,
    multi_label: bool = False,
    chosen: Mapping[str, Any] | None = None,
    metric: str | None = None,
    tables: Mapping[bool, Tables] = TABLES,
) -> dict[str, Metric]:
    """The metrics of every run, those in `chosen` (`task.metrics`), and `metric` (`task.metric`).

    `top5` needs more than five classes. ValueError for unknown names, and metrics that do not fit the targets' form.
    """
    always, more = tables[multi_label]
    if num_classes <= _FIRST:
        always, more = ({name: make for name, make in one.items() if name != "top5"} for one in (always, more))
    chosen, metric = chosen or {}, metric or LOSS
    check_metrics(metric, chosen, multi_label=multi_label, tables={multi_label: Tables(always, more)})
    named = [*(name for name, node in chosen.items() if node is True), metric.rpartition("/")[2]]
    made = {name: make(num_classes) for name, make in always.items()}
    made |= {name: more[name](num_classes) for name in named if name in more}
    for name, node in chosen.items():
        if isinstance(node, Mapping):
            made[name] = _build(node, f"task.metrics.{name}", num_classes, multi_label=multi_label)
    return made


def _build(node: Mapping[str, Any], place: str, num_classes: int, *, multi_label: bool) -> Metric:
    """A metric of torchmetrics. ValueError for the other form of targets: it would read labels as classes 0 and 1."""
    function = targets.find(node, METRICS, place)
    other = ("Multiclass", "Binary") if multi_label else "Multilabel"
    if function.__name__.startswith(other) or (_is_binary(function) and num_classes != 2):
        raise ValueError(f"{place}: {function.__name__} does not fit {num_classes} classes of this data")
    constructor = function.__init__ if inspect.isclass(function) else function
    taken = inspect.signature(constructor).parameters
    counts = {name: num_classes for name in ("num_classes", "num_labels") if name in taken}
    metric: Metric = targets.build({**node, **counts}, METRICS, place)
    metric.has_own_threshold = "threshold" in node  # type: ignore[assignment]
    return metric


def _is_binary(metric: Any) -> bool:
    """True for a metric, or its class, of the second one of two classes."""
    bases = metric.__mro__ if inspect.isclass(metric) else type(metric).__mro__
    return any(base.__module__.startswith("torchmetrics.") and base.__name__.startswith("Binary") for base in bases)


def update_metrics(metrics: Mapping[str, Any], probabilities: Tensor, decisions: Tensor, wanted: Tensor) -> None:
    """Add N samples, 0 or more, to metrics except `loss`: probabilities `[N, C]`, and the `decisions` about them.

    torchmetrics gathers lists only if every process has an entry: such metrics need empty batches, others refuse them.
    """
    for name, metric in metrics.items():
        keeps_lists = any(isinstance(state, list) for state in metric.metric_state.values())
        if name != LOSS and (len(wanted) or keeps_lists):
            read = decisions if reads_decisions(metric) else probabilities
            one_class = read.ndim == 2 and wanted.ndim == 1 and _is_binary(metric)
            metric.update(read[:, 1] if one_class else read, wanted)


def reads_decisions(metric: Metric) -> bool:
    """True if a metric counts decisions by `task.threshold`, and not probabilities or by a threshold of its own."""
    own = getattr(metric, "has_own_threshold", False) or getattr(metric, "threshold", HALF) != HALF
    return isinstance(metric, _DECIDED) and getattr(metric, "top_k", 1) == 1 and not own


def decide(probabilities: Tensor, thresholds: Tensor | None, *, multi_label: bool) -> Tensor:
    """Decisions about probabilities `[N, C]`: classes `[N]`, or with `multi_label` labels `[N, C]` of 0 and 1.

    A label is given if its probability is at least its threshold, `[C]`, by default 1/2. With a threshold `[1]` for two
    classes, the second one is chosen if its probability is at least the threshold. Else the likeliest class is chosen.
    """
    if thresholds is None:
        return (probabilities >= HALF).long() if multi_label else probabilities.argmax(dim=1)
    accepted = probabilities if multi_label else probabilities[:, 1]
    return (accepted >= thresholds.to(probabilities.device)).long()


def choose_threshold(scores: Tensor, targets: Tensor, criterion: Criterion) -> float:
    """The threshold of scores `[N]` with the best `criterion` for targets `[N]` of 0 and 1.

    f1: the F1 score of target 1. balanced_accuracy: the mean recall of both targets (Youden's index J is twice this
    mean less 1). The threshold is halfway between the lowest accepted score and the next one below, so that rounding
    changes no decision. Of equally good thresholds it is the highest; 1/2 without both targets. NaN does not count.
    """
    known = ~scores.isnan()
    scores, targets = scores[known], targets[known]
    positives = int(targets.sum())
    negatives = len(targets) - positives
    if not positives or not negatives:
        return HALF
    scores, order = scores.double().sort(descending=True)
    hits = targets[order].double().cumsum(0)  # of the n + 1 highest scores, those whose target is 1
    accepted = torch.arange(1, len(scores) + 1, device=scores.device)
    if criterion == "f1":
        quality = 2 * hits / (accepted + positives)
    else:
        quality = (hits / positives + (negatives - (accepted - hits)) / negatives) / 2
    below = torch.cat([scores[1:], scores.new_zeros(1)])
    quality[scores == below] = -1  # equal scores are accepted together
    best = int(quality.argmax())
    return float(scores[best] + below[best]) / 2


def choose_thresholds(probabilities: Tensor, targets: Tensor, criterion: Criterion, *, multi_label: bool) -> Tensor:
    """Thresholds of the labels `[C]`, or of the second one of two classes `[1]`, from probabilities `[N, C]`."""
    if not multi_label:
        probabilities, targets = probabilities[:, 1:2], targets.unsqueeze(1)
    pairs = zip(probabilities.T, targets.T, strict=True)
    return torch.tensor([choose_threshold(scores, wanted, criterion) for scores, wanted in pairs])
