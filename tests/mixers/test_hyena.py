"""Hyena equals the published layer for every length, order and way of computing it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longseq import mixers

D_MODEL, TOKENS = 8, 21
OPTIONS: list[dict[str, Any]] = [
    {},
    {"order": 3},
    {"order": 4, "convolution_width": 1},
    {"max_length": 7},  # shorter than the sequence
    {"filter_width": 5, "filter_depth": 2, "filter_bands": 1, "sine_frequency": 1.0},
    {"fast_decay": 0.01, "slow_decay": 0.2, "window_bias": 0.0},
]


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return mixers.create("hyena", D_MODEL, **options).double()


def make_tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def naive_filter(m: Any, distance: int, options: dict[str, Any]) -> Tensor:
    """All filters at one distance."""
    longest, bands = options.get("max_length", 2048), options.get("filter_bands", 16)
    t = distance / (longest - 1)
    band = torch.tensor([1e-4 + i * (bands - 1 - 1e-4) / max(bands - 1, 1) for i in range(bands)], dtype=torch.float64)
    angle = 2 * torch.pi * distance / longest * band
    h = torch.cat([torch.tensor([t], dtype=torch.float64), angle.cos(), -angle.sin()])
    for layer in m.filter.layers[:-1]:
        h = torch.sin(m.filter.frequency * layer(h))
    channel = torch.linspace(0, 1, (m.order - 1) * D_MODEL, dtype=torch.float64)
    fast, slow = options.get("fast_decay", 0.3), options.get("slow_decay", 1.5)
    rate = (1 - channel) / slow + channel / fast
    return m.filter.layers[-1](h) * (0.01 ** (t * rate) + options.get("window_bias", 0.05))


def naive(m: Any, u: Tensor, options: dict[str, Any]) -> Tensor:
    taps = m.convolution.weight.unsqueeze(1)
    x = functional.pad(m.in_proj(u).mT, (taps.shape[-1] - 1, 0))
    *gates, z = functional.conv1d(x, taps, m.convolution.bias, groups=len(taps)).mT.chunk(m.order + 1, dim=-1)
    filters = torch.stack([naive_filter(m, distance, options) for distance in range(TOKENS)])
    for n in range(m.order - 1):
        own = slice(n, None, m.order - 1)  # the filters of a channel are neighbours
        z = gates[m.order - 1 - n] * z
        past = [sum(filters[t - s, own] * z[:, s] for s in range(t + 1)) for t in range(TOKENS)]
        z = torch.stack(past, dim=1) + m.filter.skip[own] * z
    return m.out_proj(gates[0] * z)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_published_layer(options: dict[str, Any]) -> None:
    mixer, x = make(**options), make_tokens()
    expected = naive(mixer, x, options)
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-9, atol=1e-10)
    first, state = mixer(x[:, :9])
    parts = [first]
    for token in x[:, 9:].unbind(1):
        y, state = mixer.step(token, state)
        parts.append(y.unsqueeze(1))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-10)


def test_the_filter_does_not_depend_on_the_type_of_the_weights_or_on_autocast() -> None:
    filters = make().float().filter
    exact, _ = filters.double()(50, 64, torch.zeros(1, dtype=torch.float64))
    single, _ = filters.float()(50, 64, torch.zeros(1))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(filters(50, 64, torch.zeros(1))[0], single, rtol=0, atol=0)
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_changes_it_no_more_than_other_layers(dtype: torch.dtype) -> None:
    """Rounded filter weights would change the output by a third: so they stay in float32, moved or made."""
    torch.manual_seed(0)
    mixer, x = mixers.create("hyena", 64), torch.randn(2, 100, 64)
    half = copy.deepcopy(mixer).to(dtype)
    assert half.state_dict().keys() == mixer.state_dict().keys()
    assert (half.in_proj.weight.dtype, half.filter.skip.dtype) == (dtype, torch.float32)
    with torch.no_grad():
        expected, (whole, state) = mixer(x)[0], half(x[:, :90].to(dtype))
        parts = [whole]
        for token in x[:, 90:].to(dtype).unbind(1):
            y, state = half.step(token, state)
            parts.append(y[:, None])
    difference = torch.cat(parts, 1).float() - expected
    assert parts[0].dtype == parts[-1].dtype == dtype
    assert difference[:, :90].norm() < 0.012 * expected[:, :90].norm()
    assert difference[:, 90:].norm() < 0.012 * expected[:, 90:].norm()
    assert half.to("meta", torch.float64).filter.skip.dtype == torch.float64
    assert half.to(dtype).filter.layers[0].weight.dtype == torch.float32
