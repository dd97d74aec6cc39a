"""RG-LRU: its gates may saturate, and its root has a gradient where nothing is forgotten."""

from __future__ import annotations

import pytest
import torch

from longseq import mixers
from longseq.mixers.rg_lru import sqrt_one_minus_square


@pytest.mark.parametrize("level", [-200.0, 200.0], ids=["closed", "open"])
def test_gradients_are_finite_where_the_gates_saturate(level: float) -> None:
    torch.manual_seed(0)
    mixer = mixers.create("rg_lru", 16)
    with torch.no_grad():
        mixer.gate_bias.fill_(level)
    x = torch.randn(2, 21, 16, requires_grad=True)
    mixer.observed = {}
    y, state = mixer(x)
    assert mixer.observed["gate_saturation"] == 1
    (y.square().sum() + state.memory.square().sum()).backward()
    assert all(part.grad.isfinite().all() for part in (x, *mixer.parameters()))


def test_the_root_is_exact_near_one_and_has_a_gradient_at_one() -> None:
    log_a = torch.tensor([-1e-9, -1e-4, -1.0, -50.0], requires_grad=True)
    exact = (1 - (2 * log_a.double()).exp()).sqrt()
    torch.testing.assert_close(sqrt_one_minus_square(log_a).double(), exact, rtol=2e-7, atol=0)
    at_one = torch.zeros(1, requires_grad=True)
    root = sqrt_one_minus_square(at_one)
    root.sum().backward()
    assert root.item() < 1e-18
    assert at_one.grad is not None
    assert at_one.grad.isfinite().all()
