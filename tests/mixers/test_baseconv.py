"""BaseConv equals the published layer for every length and every way of computing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers

D_MODEL, TOKENS = 4, 21
OPTIONS: list[dict[str, Any]] = [
    {},
    {"filter_width": 3, "max_length": 7},  # shorter than the sequence
]


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    mixer = mixers.create("baseconv", D_MODEL, **options).double()
    torch.nn.init.normal_(mixer.bias)
    return mixer


def make_tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def naive_filter(m: Any, distance: int) -> Tensor:
    longest = m.max_length
    angle = torch.tensor(2 * torch.pi * distance / longest * 1e-4, dtype=torch.float64)
    h = torch.stack([torch.tensor(distance / (longest - 1), dtype=torch.float64), angle.cos(), -angle.sin()])
    hidden = (m.filter.hidden.weight @ h + m.filter.hidden.bias).clamp_min(0)
    return m.filter.out.weight @ hidden + m.filter.out.bias


def naive(m: Any, u: Tensor) -> Tensor:
    filters = torch.stack([naive_filter(m, distance) for distance in range(TOKENS)])
    past = [sum(filters[t - s] * u[:, s] for s in range(t + 1)) for t in range(TOKENS)]
    return (u @ m.in_proj.weight.T + m.in_proj.bias) * (torch.stack(past, dim=1) + m.bias)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_published_layer(options: dict[str, Any]) -> None:
    mixer, x = make(**options), make_tokens()
    expected = naive(mixer, x)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-9, atol=1e-10)
    first, state = mixer(x[:, :9])
    parts = [first]
    for token in x[:, 9:].unbind(1):
        y, state = mixer.step(token, state)
        parts.append(y.unsqueeze(1))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-10)
