"""Metrics that torchmetrics does not have in the form needed here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """The weighted mean of values, over all batches and processes.

    Use `MeanLoss` or `MeanScore`, which define which values are better.

    MeanMetric of torchmetrics 1.9 cannot replace this class: its check for NaN waits for the device, and without the
    check it ignores the weights.
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
