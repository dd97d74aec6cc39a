"""RG-LRU equals the published recurrence, and its root has a gradient where nothing is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longseq import mixers
from longseq.mixers.rg_lru import sqrt_one_minus_square

D_MODEL, TOKENS = 16, 21


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    mixer = mixers.create("rg_lru", D_MODEL, **options).double()
    with torch.no_grad():
        mixer.convolution.weight.normal_()
        mixer.convolution.bias.normal_()
        mixer.gate_weight.mul_(3)
        mixer.gate_bias.normal_()
        mixer.decay.normal_()
    return mixer


def make_tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def naive(m: Any, u: Tensor) -> Tensor:
    """One token at a time, with a itself and not its logarithm."""
    x, branch = m.in_proj(u).chunk(2, dim=-1)
    taps = m.convolution.weight.unsqueeze(1)
    x = functional.conv1d(functional.pad(x.mT, (taps.shape[-1] - 1, 0)), taps, m.convolution.bias, groups=m.width).mT
    h, outputs = torch.zeros_like(x[:, 0]), []
    to_r = torch.block_diag(*(block.T for block in m.gate_weight[..., : m.head_dim].unbind()))
    to_i = torch.block_diag(*(block.T for block in m.gate_weight[..., m.head_dim :].unbind()))
    for token in x.unbind(1):
        r = torch.sigmoid(token @ to_r.T + m.gate_bias[:, : m.head_dim].flatten())
        i = torch.sigmoid(token @ to_i.T + m.gate_bias[:, m.head_dim :].flatten())
        a = torch.sigmoid(-m.decay) ** (8 * r)
        h = a * h + (1 - a**2).sqrt() * i * token
        outputs.append(h)
    gate = branch / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (branch + 0.044715 * branch**3)))
    return m.out_proj(torch.stack(outputs, dim=1) * gate)


@pytest.mark.parametrize(
    "options", [{}, {"num_heads": 2}, {"width": 32, "num_heads": 4}, {"convolution_width": 2}], ids=str
)
def test_it_is_the_published_recurrence(options: dict[str, Any]) -> None:
    mixer = make(**options)
    x = make_tokens()
    torch.testing.assert_close(mixer(x)[0], naive(mixer, x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("level", [-200.0, 200.0], ids=["closed", "open"])
def test_gradients_are_finite_where_the_gates_saturate(level: float) -> None:
    mixer = make().float()
    with torch.no_grad():
        mixer.gate_bias.fill_(level)
    x = make_tokens().float().requires_grad_()
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
