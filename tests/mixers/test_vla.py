"""VLA's options and what it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longseq import mixers
from longseq.kernels import variational_linear_attention

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


@pytest.mark.parametrize("scaled", [True, False])
def test_it_is_algorithm_1_of_the_paper(scaled: bool) -> None:
    """Written out for one head from the raw projections, with u as in line 10 or as in equation 8."""
    mixer, x = make(scale_penalty=scaled), make_tokens()
    q, k, v = mixer.in_proj(x).chunk(3, dim=-1)
    outputs = []
    for row in range(2):
        S, A, z = torch.zeros(32, 32).double(), 10 * torch.eye(32).double(), torch.zeros(32).double()
        for t in range(30):
            feature = functional.elu(k[row, t]) + 1
            key = feature / feature.norm()
            u = mixer.penalty[0] @ k[row, t]
            u = u / u.norm() / (32**0.5 if scaled else 1)
            A = A - torch.outer(A @ u, A @ u) / (1 + u @ A @ u)
            if (t + 1) % 20 == 0:
                A = A + 1e-3 * torch.eye(32)
            alpha = A @ key / (A @ key).norm()
            S = S + torch.outer(alpha, v[row, t] - S.T @ key)
            z = z + feature
            query = functional.elu(q[row, t]) + 1
            outputs.append(S.T @ query / (z @ query).clamp_min(1e-4))
    expected = mixer.out_proj(torch.stack(outputs).unflatten(0, (2, 30)))
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-9, atol=1e-10)


def test_each_head_has_its_own_penalty() -> None:
    mixer, x = make(head_dim=8), make_tokens()
    assert mixer.penalty.shape == (4, 8, 8)
    q, k, v = mixer.in_proj(x).unflatten(-1, (3, 4, 8)).unbind(-3)
    heads = []
    for head in range(4):
        u = functional.normalize(k[:, :, head] @ mixer.penalty[head].T, dim=-1) / 8**0.5
        sequences = [(functional.elu(y) + 1) for y in (q, k)] + [v]
        o, _ = variational_linear_attention(*(y[:, :, head : head + 1] for y in sequences), u.unsqueeze(2))
        heads.append(o.squeeze(2))
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(torch.cat(heads, -1)), rtol=1e-9, atol=1e-10)


def test_a_fixed_inverse_has_no_penalty_to_learn() -> None:
    mixer = make(update_penalty=False)
    assert mixer.penalty is None
    _, state = mixer(make_tokens())
    assert torch.equal(state.inverse, mixer.initial_state(2, dtype=torch.float64).inverse)
    assert mixer.flops(10) < make().flops(10)


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
