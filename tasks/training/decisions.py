"""Decisions about classes from their probabilities, and thresholds that are chosen for them."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from longseq.tasks.config import Criterion

# Of several labels without a threshold of their own.
HALF = 0.5


def decide(probabilities: Tensor, thresholds: Tensor | None, *, multi_label: bool) -> Tensor:
    """The decisions about probabilities `[N, C]`: the class of each row `[N]`, or with `multi_label` `[N, C]` of 0 and
    1.

    A label is there if its probability is at least its threshold, `[C]`, by default 1/2. Of two classes, the second one
    is chosen if its probability is at least the threshold `[1]`. Else the most probable class is chosen.
    """
    if thresholds is not None:
        thresholds = thresholds.to(probabilities.device)
    if multi_label:
        return (probabilities >= (HALF if thresholds is None else thresholds)).long()
    if thresholds is None:
        return probabilities.argmax(dim=1)
    return (probabilities[:, 1] >= thresholds).long()


def choose_threshold(scores: Tensor, targets: Tensor, criterion: Criterion) -> float:
    """The threshold of scores `[N]` for targets `[N]` of 0 and 1 with the best `criterion` on them.

    f1: the F1 score of the targets that are 1. balanced_accuracy: the mean of the shares of both targets that are
    recognised (Youden's index J is twice this mean less 1). The threshold is the middle between the lowest score that
    is accepted and the next one below, so that rounding changes no decision. Of equally good thresholds it is the
    highest; 1/2 without both targets. A score that is NaN is accepted by no threshold, and does not count.
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


class Scores(Metric):
    """Keeps probabilities `[N, C]` and targets, from which thresholds are chosen after the last batch."""

    full_state_update = False

    probabilities: list[Tensor]
    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("probabilities", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, probabilities: Tensor, targets: Tensor) -> None:
        """Add samples, maybe none: each process must have been given a batch."""
        self.probabilities.append(probabilities)
        self.targets.append(targets)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Those of all processes."""
        return dim_zero_cat(self.probabilities), dim_zero_cat(self.targets)

    def own(self) -> tuple[Tensor, Tensor]:
        """Those of this process."""
        return torch.cat(list(self.probabilities)), torch.cat(list(self.targets))

    def choose(self, criterion: Criterion, *, multi_label: bool) -> Tensor:
        """The thresholds of each label `[C]`, or of the second one of two classes `[1]`, on all processes' samples."""
        probabilities, targets = self.compute()
        if multi_label:
            pairs = zip(probabilities.T, targets.T, strict=True)
        else:
            pairs = zip([probabilities[:, 1]], [targets], strict=True)
        chosen = [choose_threshold(scores, wanted, criterion) for scores, wanted in pairs]
        return torch.tensor(chosen)
