"""VLA's options and what it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers

OPTIONS: list[dict[str, Any]] = [
    {"convolution_width": 4},
    {"lambda0": 1.0},
    {"refresh_period": None},
    {"refresh_period": 3},
    {"refresh": 1.0},
    {"eps": 40.0},
    {"scale_penalty": False},
    {"update_penalty": False},
    {"normalize_key": False, "head_dim": 4, "lambda0": 1.0},
    {"normalize_alpha": False, "lambda0": 1.0},
    {"normalizer": False},
    {"head_dim": 8},
    {"num_heads": 2},
]


def make(**options: Any) -> mixers.Mixer:
    torch.manual_seed(0)
    return mixers.create("vla", 32, **options).double().eval()


def make_tokens(tokens: int = 30) -> Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_changes_the_layer_and_keeps_the_contract(options: dict[str, Any]) -> None:
    mixer, x = make(**options), make_tokens()
    expected, _ = mixer(x)
    assert (expected - make()(x)[0]).norm() > 1e-8 * expected.norm()
    state, parts = mixer.initial_state(2, dtype=x.dtype), []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        parts.append(y)
    torch.testing.assert_close(torch.stack(parts, dim=1), expected, rtol=1e-9, atol=1e-10)


def test_a_fixed_inverse_has_no_penalty_to_learn() -> None:
    mixer = make(update_penalty=False)
    assert mixer.penalty is None
    _, state = mixer(make_tokens())
    assert torch.equal(state.inverse, mixer.initial_state(2, dtype=torch.float64).inverse)
    assert mixer.flops(10) < make().flops(10)
    assert mixers.check("vla", laws=["flops_are_those_of_the_steps"], update_penalty=False) == ()


def test_it_reports_the_norm_of_its_memory_and_the_health_of_its_inverse() -> None:
    mixer = make()
    mixer.observed = {}
    _, state = mixer(make_tokens())
    norm = torch.linalg.matrix_norm(state.memory).mean().float()
    torch.testing.assert_close(mixer.observed["state_norm"], norm)
    smallest = torch.linalg.eigvalsh(state.inverse).min().float()
    torch.testing.assert_close(mixer.observed["smallest_eigenvalue"], smallest)
    assert 0 < smallest < 10
    mixer(make_tokens() * torch.nan)
    assert mixer.observed["smallest_eigenvalue"].isnan()
