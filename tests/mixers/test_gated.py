"""The mixers with decays, compared with other forms of their papers, and in limits where two of them agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longseq import mixers
from longseq.kernels import selective_scan

D_MODEL = 32
TOKENS = 21


def make(name: str, d_model: int = D_MODEL, **options: Any) -> Any:
    torch.manual_seed(0)
    return mixers.create(name, d_model, **options).double().eval()


def make_tokens(batch: int = 2, tokens: int = TOKENS, d_model: int = D_MODEL) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, d_model, generator=generator, dtype=torch.float64)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_gated_deltanet_without_decay_is_deltanet() -> None:
    plain = make("deltanet", num_heads=2)
    gated = make("gated_deltanet", num_heads=2, expand_k=1.0, expand_v=1.0, output_gate=False)
    weights = plain.state_dict()
    weights["in_proj.weight"] = torch.cat([weights["in_proj.weight"], torch.randn(2, D_MODEL, dtype=torch.float64)])
    weights |= {"A_log": torch.full((2,), -torch.inf), "dt_bias": torch.zeros(2)}
    gated.load_state_dict(weights)
    x = make_tokens()
    assert_same(gated(x)[0], plain(x)[0])
    gated.A_log.data.zero_()
    assert (gated(x)[0] - plain(x)[0]).abs().max() > 1e-2


def test_retnet_is_the_parallel_form_of_its_paper() -> None:
    """Equation 5: (Q Kᵀ ⊙ D) V with D_nm = γ^{n-m} for n ≥ m, q and k turned by e^{inθ}."""
    mixer, x = make("retnet", num_heads=2), make_tokens()
    q, k, v, gate = mixer.in_proj(x).split([32, 32, 64, 64], dim=-1)
    time = torch.arange(TOKENS, dtype=torch.float64)
    angle = time[:, None, None] * 10000 ** (-torch.arange(8, dtype=torch.float64) / 8)
    q, k = (torch.complex(*y.unflatten(-1, (2, 16)).chunk(2, dim=-1)) * torch.exp(1j * angle) for y in (q, k))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.conj()).real / 4
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 64], dtype=torch.float64)
    decay = (gamma[:, None, None] ** (time[:, None] - time)).tril()
    o = torch.einsum("bhnm,bmhd->bnhd", scores * decay, v.unflatten(-1, (2, 32)))
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_same(mixer(x)[0], mixer.out_proj(o.flatten(-2) * functional.silu(gate)))


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


@pytest.mark.parametrize("bound", [0.0, 1e-6, 0.3, 0.999])
def test_hgrn2_gate_and_key_add_up_to_one(bound: float) -> None:
    mixer = make("hgrn2", lower_bound=bound, num_heads=1)
    logits = torch.linspace(-30, 30, D_MODEL, dtype=torch.float64)
    projected = torch.cat([torch.zeros(D_MODEL), logits, torch.ones(D_MODEL)]).double()[None, None]
    _, k, _, g = mixer._split(projected)
    expected = bound + (1 - bound) * logits.sigmoid()
    torch.testing.assert_close(g.exp().flatten(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(k.flatten(), (1 - bound) * (-logits).sigmoid(), rtol=1e-12, atol=0)
    near_one = g.flatten()[-5:]
    torch.testing.assert_close(near_one, torch.log1p(-k.flatten()[-5:]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_mamba_with_one_decay_a_head(groups: int) -> None:
    """State space duality: Mamba's scan with A shared by the channels and states of a head, for each group."""
    mixer, x = make("mamba2", head_dim=16, state_size=6, n_groups=groups), make_tokens()
    z, mixed, dt = mixer.in_proj(x).split([64, 64 + 12 * groups, 4], dim=-1)
    taps = functional.pad(mixed.mT, (3, 0)).unfold(-1, 4, 1) * mixer.convolution.weight[:, None]
    mixed = functional.silu(taps.sum(-1) + mixer.convolution.bias[:, None]).mT
    u, B, C = mixed.split([64, 6 * groups, 6 * groups], dim=-1)
    delta = functional.softplus(dt + mixer.dt_bias).repeat_interleave(16, dim=-1)
    A = -mixer.A_log.exp().repeat_interleave(16)[:, None].expand(64, 6)
    width = 64 // groups
    outputs = []
    for group in range(groups):
        part, states = slice(group * width, (group + 1) * width), slice(group * 6, (group + 1) * 6)
        scanned, _ = selective_scan(u[..., part], delta[..., part], A[part], B[..., states], C[..., states])
        y = (scanned + mixer.D.repeat_interleave(16)[part] * u[..., part]) * functional.silu(z[..., part])
        outputs.append(y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert_same(mixer(x)[0], mixer.out_proj(torch.cat(outputs, dim=-1)))


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
