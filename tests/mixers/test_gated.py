"""The mixers with decays: extreme gates, and what they report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers

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


def measure(mixer: Any, x: Tensor, **options: Any) -> dict[str, Tensor]:
    mixer.observed = {}
    mixer(x, **options)
    observed, mixer.observed = mixer.observed, None
    return observed


def test_key_write_norm_is_the_norm_of_what_is_written() -> None:
    """For one token with a memory of zero, S = β k vᵀ, so the norm of β k kᵀ is that of S where v = k."""
    for option, strongest in (({}, 1.0), ({"negative_eigenvalues": True}, 2.0)):
        mixer, x = make("deltanet", num_heads=1, **option), make_tokens()
        beta = strongest * mixer.in_proj(x)[..., -1].sigmoid()
        torch.testing.assert_close(measure(mixer, x)["key_write_norm"], beta.mean().float())
    mixer = make("gated_deltanet", num_heads=1, key_norm="l1")
    assert measure(mixer, make_tokens())["key_write_norm"] < 0.5, "keys of l1 norm one are shorter in l2"
