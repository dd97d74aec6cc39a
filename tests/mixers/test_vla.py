"""VLA's options and what it reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longseq import mixers


def make(**options: Any) -> mixers.Mixer:
    torch.manual_seed(0)
    return mixers.create("vla", 32, **options).double().eval()


def make_tokens(tokens: int = 30) -> Tensor:
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


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
