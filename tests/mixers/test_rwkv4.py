"""RWKV-4: the average is exact for keys and decays of any size, in float32 and in graphs of open length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers
from longseq.state import state_tensors

D_MODEL, TOKENS = 6, 70


def make() -> Any:
    torch.manual_seed(0)
    return mixers.create("rwkv4", D_MODEL)


def set_keys(mixer: Any, level: float, decay: float) -> None:
    """Keys of about `level`, of either sign, and decays of e^decay a token."""
    with torch.no_grad():
        mixer.mix.fill_(1.0)
        mixer.key.weight.copy_(level * torch.eye(D_MODEL))
        mixer.decay.fill_(decay)


def make_tokens(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randn(batch, tokens, D_MODEL, generator=torch.Generator().manual_seed(1))


def average(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """The average by its definition: the softmax of all weights at once, in float64."""
    distance = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).double().unsqueeze(-1)
    scores = k.double().unsqueeze(1) - (distance - 1) * decay.double().exp()
    scores = torch.where(distance == 0, k.double().unsqueeze(1) + bonus.double(), scores)
    scores = scores.masked_fill(distance < 0, -torch.inf)
    return (scores.softmax(2) * v.double().unsqueeze(1)).sum(2)


@pytest.mark.parametrize("level", [0.0, 1.0, 50.0, 300.0])
@pytest.mark.parametrize("decay", [-12.0, -1.0, 3.0])
def test_keys_and_decays_of_any_size_are_exact_in_float32(level: float, decay: float) -> None:
    mixer, x = make(), make_tokens().requires_grad_()
    set_keys(mixer, level, decay)
    y, state = mixer(x)
    k, v, r = level * x, mixer.value(x), mixer.receptance(x)
    expected = mixer.out_proj((r.sigmoid() * average(k, v, mixer.decay, mixer.bonus)).float())
    # A key of 900 has steps of 6e-5 in float32.
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5 if level < 100 else 1e-3)
    given = [x, mixer.value.weight, mixer.decay, mixer.bonus]
    weights = torch.randn_like(y)
    for ours, wanted in zip(
        torch.autograd.grad(y, given, weights, retain_graph=True),
        torch.autograd.grad(expected, given, weights),
        strict=True,
    ):
        assert (ours - wanted).norm() <= 1e-3 * wanted.norm() + 1e-4
    assert state.denominator.min() >= 0.999
    assert all(value.isfinite().all() for _, value in state_tensors(state))


def test_the_decay_gets_its_gradient_where_rounding_makes_gates_positive() -> None:
    """Between large keys, the exponent falls by the decay alone: its log gate is 0 up to rounding."""
    mixer = make().double()
    set_keys(mixer, 0.0, -3.0)
    with torch.no_grad():
        mixer.key.weight[:, 0] = 8.0
    x = make_tokens(1).double()
    x[..., 0] = 0
    x[:, ::9, 0] = 1.0
    single = mixers.create("rwkv4", D_MODEL)
    single.load_state_dict(mixer.float().state_dict())
    exact = make().double()
    exact.load_state_dict(single.state_dict())
    gradients = []
    for layer, given in ((exact, x), (single, x.float())):
        layer(given)[0].square().sum().backward()
        gradients.append(layer.decay.grad.double())
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()
