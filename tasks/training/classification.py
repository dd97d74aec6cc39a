"""Metrics of classifiers by their names, and those that a configuration names; all of them are of torchmetrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics import classification as tm
from torchmetrics.functional.classification import binary_auroc, binary_average_precision
from torchmetrics.utilities.data import dim_zero_cat

from longseq.tasks.training import targets
from longseq.tasks.training.decisions import HALF
from longseq.tasks.training.targets import METRICS

Make = Callable[[int], Metric]

LOSS = "loss"
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
# Arguments of metrics that follow from the data.
_COUNTS = ("num_classes", "num_labels")


class _MeanOfShares:
    """The mean of a score of decisions over the classes that samples have; of `predicted`, or that they are given."""

    predicted: bool
    _final_state: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]

    def __init__(self, classes: int) -> None:
        super().__init__(classes, average="none", **_OWN)  # type: ignore[call-arg]

    def compute(self) -> Tensor:
        scores = super().compute()  # type: ignore[misc]
        tp, fp, _, fn = self._final_state()
        return scores[(tp + fn + fp if self.predicted else tp + fn) > 0].mean()


class MeanRecall(_MeanOfShares, tm.MulticlassRecall):
    """The mean over the classes of the share of their samples that is recognised; classes without samples do not count.

    It is the balanced accuracy. torchmetrics counts a class without samples as 0 as soon as a model predicts it.
    """

    predicted = False


class MeanLabelRecall(_MeanOfShares, tm.MultilabelRecall):
    """`MeanRecall` of several labels: those that no sample has do not count."""

    predicted = False


class MeanLabelPrecision(_MeanOfShares, tm.MultilabelPrecision):
    """The mean precision of the labels that a sample has or is given, as torchmetrics has it of classes.

    A label that is given and that no sample has counts as 0.
    """

    predicted = True


class MeanLabelF1(_MeanOfShares, tm.MultilabelF1Score):
    """The mean F1 score of the labels that a sample has or is given, as scikit-learn has it of classes.

    A label that is given and that no sample has counts as 0. It is scikit-learn's score with `zero_division=nan`.
    """

    predicted = True


class _MeanOfRanks:
    """Computes a score of ranked probabilities, class by class, and its mean over the classes that have one."""

    preds: Any  # the states of torchmetrics' curves: probabilities [N, C], and classes [N] or labels [N, C]
    target: Any
    score: Callable[..., Tensor]

    def compute(self) -> Any:  # as torchmetrics' curves have it, a Tensor
        probabilities, wanted = dim_zero_cat(self.preds), dim_zero_cat(self.target)
        scores = []
        for number, ranked in enumerate(probabilities.T):
            there = wanted == number if wanted.ndim == 1 else wanted[:, number] > 0
            if self._defined(int(there.sum()), len(there)):
                scores.append(type(self).score(ranked, there.long(), **_OWN))
        return torch.stack(scores).mean() if scores else probabilities.new_full((), torch.nan)

    def _defined(self, positives: int, samples: int) -> bool:
        return positives > 0


class MeanAveragePrecision(_MeanOfRanks, tm.MulticlassAveragePrecision):
    """The mean of the classes' average precisions; classes without samples do not count."""

    score = staticmethod(binary_average_precision)


class MeanLabelAveragePrecision(_MeanOfRanks, tm.MultilabelAveragePrecision):
    """The mean of the labels' average precisions; labels that no sample has do not count."""

    score = staticmethod(binary_average_precision)


class MeanAUROC(_MeanOfRanks, tm.MulticlassAUROC):
    """The mean of the areas below the curves of each class against the others; classes of no or all samples do not
    count.
    """

    score = staticmethod(binary_auroc)

    def _defined(self, positives: int, samples: int) -> bool:
        return 0 < positives < samples


class MeanLabelAUROC(_MeanOfRanks, tm.MultilabelAUROC):
    """The mean of the areas below the labels' curves; labels that no sample or each one has do not count."""

    score = staticmethod(binary_auroc)

    def _defined(self, positives: int, samples: int) -> bool:
        return 0 < positives < samples


_FIRST = 5  # classes, among which the accuracy top5 seeks the right one


def _top(places: int) -> Make:
    return lambda classes: tm.MulticlassAccuracy(classes, top_k=places, average="micro", **_OWN)


def _averaged(metric: Callable[..., Metric], average: str | None = None) -> Make:
    more = {} if average is None else {"average": average}
    return lambda classes: metric(classes, **more, **_OWN)


# The metrics that every run has, and those that it has if they are named. Averages are macro: the mean over the classes
# that the samples have; of f1 and precision also over those that are predicted alone, which count as 0.
ONE_LABEL: Mapping[str, Make] = {
    "top1": _top(1),
    "top5": _top(_FIRST),
    "f1": _averaged(tm.MulticlassF1Score, "macro"),
    "balanced_accuracy": MeanRecall,
}
ONE_LABEL_MORE: Mapping[str, Make] = {
    "f1_weighted": _averaged(tm.MulticlassF1Score, "weighted"),
    "precision": _averaged(tm.MulticlassPrecision, "macro"),
    "recall": MeanRecall,
    "auroc": _averaged(MeanAUROC),
    "average_precision": _averaged(MeanAveragePrecision),
    "calibration_error": _averaged(tm.MulticlassCalibrationError),
    "cohen_kappa": _averaged(tm.MulticlassCohenKappa),
    "matthews": _averaged(tm.MulticlassMatthewsCorrCoef),
}
SEVERAL_LABELS: Mapping[str, Make] = {
    "accuracy": _averaged(tm.MultilabelExactMatch),
    "f1": MeanLabelF1,
    "f1_micro": _averaged(tm.MultilabelF1Score, "micro"),
    "average_precision": _averaged(MeanLabelAveragePrecision),
}
SEVERAL_LABELS_MORE: Mapping[str, Make] = {
    "f1_weighted": _averaged(tm.MultilabelF1Score, "weighted"),
    "precision": MeanLabelPrecision,
    "recall": MeanLabelRecall,
    "auroc": _averaged(MeanLabelAUROC),
}


class Tables(NamedTuple):
    """The metrics of a task by their names: those that every run has, and those that it has if they are named."""

    always: Mapping[str, Make]
    more: Mapping[str, Make]


# By `multi_label`.
TABLES: Mapping[bool, Tables] = {
    False: Tables(ONE_LABEL, ONE_LABEL_MORE),
    True: Tables(SEVERAL_LABELS, SEVERAL_LABELS_MORE),
}


def known_metrics(chosen: Mapping[str, Any], tables: Tables) -> list[str]:
    """The names that `task.metric` may give, without `val/`; `chosen` are those of `task.metrics`."""
    return list(dict.fromkeys([LOSS, *tables.always, *tables.more, *chosen]))


def check_metrics(
    metric: str, chosen: Mapping[str, Any], *, multi_label: bool, tables: Mapping[bool, Tables] = TABLES
) -> None:
    """Raise ValueError for names of metrics that do not exist, before the data is opened."""
    own = {name: node for name, node in chosen.items() if isinstance(node, Mapping)}
    known = known_metrics(own, tables[multi_label])
    named = [name for name, node in chosen.items() if node is True]
    for name in (*named, metric.removeprefix("val/")):
        if name not in known:
            raise ValueError(f"{name} names no metric: choose one of {', '.join(known)}")


def make_metrics(
    num_classes: int,
    *,
    multi_label: bool = False,
    chosen: Mapping[str, Any] | None = None,
    metric: str | None = None,
    tables: Mapping[bool, Tables] = TABLES,
) -> dict[str, Metric]:
    """The metrics of a run: those of every run, those of `task.metrics`, and the one that `task.metric` names.

    `tables` are those of the task, for one label and for several. Accuracy among the first five is measured of more
    than five classes. ValueError for a metric for the other form of targets, and for a name that no metric has.
    """
    always, more = tables[multi_label]
    if num_classes <= _FIRST:
        always, more = ({name: make for name, make in one.items() if name != "top5"} for one in (always, more))
    made = {name: make(num_classes) for name, make in always.items()}
    named = [name for name, node in (chosen or {}).items() if node is True]
    if metric is not None:
        named.append(metric.rpartition("/")[2])
    made |= {name: more[name](num_classes) for name in named if name in more}
    for name, node in (chosen or {}).items():
        if isinstance(node, Mapping):
            made[name] = _build(node, f"task.metrics.{name}", num_classes, multi_label=multi_label)
    if unknown := next((name for name in named if name not in made and name != LOSS), None):
        raise ValueError(f"{unknown} names no metric: choose one of {', '.join([LOSS, *made, *more])}")
    return made


def _build(node: Mapping[str, Any], place: str, num_classes: int, *, multi_label: bool) -> Metric:
    """A metric of torchmetrics for the classes of the data.

    One for the other form of targets would read the labels of all samples as classes 0 and 1.
    """
    function = targets.find(node, METRICS, place)
    other = ("Multiclass", "Binary") if multi_label else "Multilabel"
    if function.__name__.startswith(other) or (_is_binary(function) and num_classes != 2):
        raise ValueError(f"{place}: {function.__name__} does not fit {num_classes} classes of this data")
    constructor = function.__init__ if inspect.isclass(function) else function
    counts = {name: num_classes for name in _COUNTS if name in inspect.signature(constructor).parameters}
    metric: Metric = targets.build({**node, **counts}, METRICS, place)
    metric.has_own_threshold = "threshold" in node  # type: ignore[assignment]
    return metric


def _is_binary(metric: Any) -> bool:
    """True for a metric of the second one of two classes, by the name that torchmetrics gives those."""
    cls = metric if inspect.isclass(metric) else type(metric)
    return any(
        base.__module__.startswith("torchmetrics.") and base.__name__.startswith("Binary") for base in cls.__mro__
    )


def update_metrics(metrics: Mapping[str, Any], probabilities: Tensor, decisions: Tensor, wanted: Tensor) -> None:
    """Add samples, maybe none, to metrics: probabilities `[N, C]`, and the `decisions` about them.

    Metrics with lists are given empty batches, too: torchmetrics can gather the lists of several processes only if each
    process has the shape and the type of their entries. The others refuse empty batches. A metric `loss` is left alone.
    """
    for name, metric in metrics.items():
        if name != LOSS and (len(wanted) or _keeps_lists(metric)):
            read = decisions if reads_decisions(metric) else probabilities
            one_class = read.ndim == 2 and wanted.ndim == 1 and _is_binary(metric)
            metric.update(read[:, 1] if one_class else read, wanted)


def reads_decisions(metric: Metric) -> bool:
    """True if a metric counts decisions, which `task.threshold` changes.

    One with a threshold of its own, in a configuration or by its class, decides by that, and reads probabilities.
    """
    own = getattr(metric, "has_own_threshold", False) or getattr(metric, "threshold", HALF) != HALF
    return isinstance(metric, _DECIDED) and getattr(metric, "top_k", 1) == 1 and not own


def _keeps_lists(metric: Metric) -> bool:
    return any(isinstance(state, list) for state in metric.metric_state.values())


def sparse_counts(counts: Tensor) -> dict[str, Any]:
    """A confusion matrix for a checkpoint: its shape, and the places and values of what is not 0."""
    places = counts.nonzero()
    return {"shape": list(counts.shape), "places": places.int(), "values": counts[tuple(places.T)]}


def dense_counts(saved: Mapping[str, Any]) -> Tensor:
    """The inverse of `sparse_counts`."""
    counts = torch.zeros(saved["shape"], dtype=saved["values"].dtype)
    counts[tuple(saved["places"].long().T)] = saved["values"]
    return counts
