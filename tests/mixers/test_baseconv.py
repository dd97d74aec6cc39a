"""BaseConv equals the published layer for every filter, every length and every way of computing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import from_pretrained, mixers
from longseq.backbones.tokens import TokenBackbone

D_MODEL, TOKENS = 4, 21
OPTIONS: list[dict[str, Any]] = [
    {},
    {"filter_width": 3, "max_length": 7},  # shorter than the sequence
    {"filter": "short"},
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
    if hasattr(m.filter, "width"):  # the last tap is that of the token itself
        return m.filter.weight[:, 2 - distance] if distance < 3 else torch.zeros(D_MODEL, dtype=torch.float64)
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


def test_a_short_filter_reads_packed_rows_backwards_and_with_padding_as_single_sequences() -> None:
    mixer, (one, other) = make(filter="short"), make_tokens()
    one, borders = one[:9].clone(), torch.tensor([0, 9, 9 + TOKENS])
    padded = torch.zeros(2, TOKENS, D_MODEL, dtype=torch.float64)
    padded[0, -9:], padded[1] = one, other
    mask = torch.arange(TOKENS) >= torch.tensor([[TOKENS - 9], [0]])
    for mixer.reverse in (False, True):
        expected, states = zip(*(mixer(row[None]) for row in (one, other)), strict=True)
        packed, state = mixer(torch.cat([one, other])[None], cu_seqlens=borders)
        torch.testing.assert_close(packed, torch.cat(expected, dim=1))
        torch.testing.assert_close(state.convolution, torch.cat([each.convolution for each in states]))
        y, state = mixer(padded, mask=mask)
        torch.testing.assert_close(y[mask], packed[0])
        torch.testing.assert_close(state.convolution, torch.cat([each.convolution for each in states]))
    assert state.convolution.shape == mixer.initial_state(2).convolution.shape == (2, D_MODEL, 2)


def test_a_short_filter_has_the_gradients_of_the_formula() -> None:
    mixer, x = make(filter="short"), make_tokens().requires_grad_()
    parameters = (x, *mixer.parameters())
    expected = torch.autograd.grad(naive(mixer, x).square().sum(), parameters)
    torch.testing.assert_close(torch.autograd.grad(mixer(x)[0].square().sum(), parameters), expected)


def test_layers_take_filters_in_turn_and_keep_them_in_files(tmp_path: Path) -> None:
    options = {"filter": ["short", "implicit"], "max_length": 16}
    model = TokenBackbone(
        vocab_size=11, d_model=8, depth=4, mlp=None, mixer="2xbaseconv+longhorn", mixer_options={"baseconv": options}
    )
    widths = [getattr(getattr(block.mixer, "filter", None), "width", None) for block in model.blocks]
    assert widths == [3, None, None, 3]
    assert [block.mixer.growing_state for block in model.blocks] == [False, True, False, False]
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.arguments["mixer_options"]["baseconv"]["filter"] == ["short", "implicit"]
    tokens = torch.arange(20).view(2, 10) % 11
    expected, _ = model(tokens)
    state, parts = loaded.initial_state(2), []
    for token in tokens.unbind(1):
        logits, state = loaded.step(token, state)
        parts.append(logits)
    torch.testing.assert_close(torch.stack(parts, 1), expected, rtol=1e-4, atol=1e-5)
