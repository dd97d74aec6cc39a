"""Extreme gates of mixers with decays, and what mixers report; VLA's inverse and RG-LRU's root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers
from longseq.mixers.rg_lru import sqrt_one_minus_square

D_MODEL = 32
TOKENS = 21


def make(name: str, d_model: int = D_MODEL, **options: Any) -> Any:
    torch.manual_seed(0)
    return mixers.create(name, d_model, **options).double().eval()


def make_tokens(batch: int = 2, tokens: int = TOKENS, d_model: int = D_MODEL) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, d_model, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", ["gla", "hgrn2"])
def test_extreme_gates_stay_finite(name: str) -> None:
    """The gates' logs are computed from their logits: a gate that rounds to 0 or 1 has a finite log and gradient."""
    for options in ({}, {"lower_bound": 1e-9}) if name == "hgrn2" else ({},):
        mixer = make(name, **options).float()
        x = 1e4 * make_tokens().float()
        y, state = mixer(x)
        (y.square().mean() + state.memory.square().mean()).backward()
        assert y.isfinite().all()
        assert state.memory.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


def test_a_fixed_inverse_has_no_penalty_to_learn() -> None:
    mixer = make("vla", update_penalty=False)
    assert mixer.penalty is None
    _, state = mixer(make_tokens())
    assert torch.equal(state.inverse, mixer.initial_state(2, dtype=torch.float64).inverse)
    assert mixer.flops(10) < make("vla").flops(10)
    assert mixers.check("vla", laws=["flops_are_those_of_the_steps"], update_penalty=False) == ()


@pytest.mark.parametrize("level", [-200.0, 200.0], ids=["closed", "open"])
def test_gradients_are_finite_where_the_gates_saturate(level: float) -> None:
    torch.manual_seed(0)
    mixer = mixers.create("rg_lru", 16)
    with torch.no_grad():
        mixer.gate_bias.fill_(level)
    x = torch.randn(2, 21, 16, requires_grad=True)
    y, state = mixer(x)
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
