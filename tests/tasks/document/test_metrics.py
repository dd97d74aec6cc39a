"""The metrics of documents against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, average_precision_score, f1_score

from longseq.tasks.document.report import TABLES
from longseq.tasks.training.metrics import decide, update_metrics

CLASSES, DOCUMENTS = 4, 60


def draw(multi_label):
    """Probabilities and targets."""
    random = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(DOCUMENTS, CLASSES, generator=random)
    if multi_label:
        targets = (scores + 2 * torch.randn(DOCUMENTS, CLASSES, generator=random) > 1).float()
        return scores.sigmoid(), targets
    targets = (scores + 3 * torch.randn(DOCUMENTS, CLASSES, generator=random)).argmax(dim=1)
    return scores.softmax(dim=1), targets


def expected(probabilities, targets, multi_label):
    """The metrics by scikit-learn and numpy."""
    probabilities, targets = probabilities.double().numpy(), targets.numpy()
    chosen = probabilities > 0.5 if multi_label else probabilities.argmax(axis=1)
    found = {
        "accuracy": accuracy_score(targets, chosen),
        "f1_micro": f1_score(targets, chosen, average="micro"),
        "f1_macro": f1_score(targets, chosen, average="macro"),
    }
    if multi_label:
        found["average_precision"] = average_precision_score(targets, probabilities, average="macro")
        sure, right = probabilities.ravel(), targets.ravel()
    else:
        sure, right = probabilities.max(axis=1), chosen == targets
    bins = np.minimum((sure * 15).astype(int), 14)
    gaps = [abs(sure[bins == one].sum() - right[bins == one].sum()) for one in np.unique(bins)]
    return {**found, "calibration_error": sum(gaps) / len(sure)}


@pytest.mark.parametrize("multi_label", [False, True])
def test_metrics_are_those_of_scikit_learn(multi_label):
    probabilities, targets = draw(multi_label)
    scores = {name: make(CLASSES) for name, make in TABLES[multi_label].always.items()}
    for part in torch.arange(DOCUMENTS).split(13):
        decisions = decide(probabilities[part], None, multi_label=multi_label)
        update_metrics(scores, probabilities[part], decisions, targets[part].long())
    found = {name: float(metric.compute()) for name, metric in scores.items()}
    assert found == pytest.approx(expected(probabilities, targets, multi_label), abs=1e-6)
