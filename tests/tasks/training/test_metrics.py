"""Our own metrics."""

from __future__ import annotations

import pytest
import torch

from longseq.tasks.training.metrics import WeightedMean


def test_a_mean_by_weights():
    metric = WeightedMean()
    for value, weight in ((1.0, 1), (2.0, torch.tensor(3)), (torch.pi, 0)):
        metric.update(torch.tensor(value), weight)
    assert metric.compute() == pytest.approx(7 / 4)
    metric.reset()
    metric.update(torch.tensor(0.5), 2)
    assert metric.compute() == 0.5
