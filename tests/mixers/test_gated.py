"""The mixers with decays, compared with other forms of their papers, and in limits where two of them agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import cases
from torch import Tensor
from torch.nn import functional

from longseq import mixers
from longseq.kernels import linear_attention, selective_scan
from longseq.parameters import no_weight_decay

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


def by_steps(mixer: Any, x: Tensor) -> Tensor:
    state, outputs = mixer.initial_state(x.shape[0], dtype=x.dtype), []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("gated_deltanet", option)
        for option in (
            {"num_heads": 3},
            {"head_dim": 12},
            {"expand_k": 0.5},
            {"expand_v": 1.5},
            {"convolution_width": 0},
            {"convolution_width": 2},
            {"feature_map": "elu_plus_one"},
            {"key_norm": "l1"},
            {"output_gate": False},
            {"dt_max": 1.0},
            {"dt_min": 0.1},
            {"norm_eps": 0.1},
        )
    ),
    *(
        ("retnet", option)
        for option in (
            {"num_heads": 2},
            {"head_dim": 8},
            {"expand_v": 1.0},
            {"rotary_base": 10.0},
            {"norm_eps": 0.1},
        )
    ),
    *(
        ("gla", option)
        for option in (
            {"num_heads": 2},
            {"expand_k": 1.0},
            {"expand_v": 2.0},
            {"gate_rank": 3},
            {"gate_temperature": 1.0},
            {"norm_eps": 0.1},
        )
    ),
    *(
        ("hgrn2", option)
        for option in (
            {"num_heads": 2},
            {"head_dim": 8},
            {"lower_bound": 0.9},
            {"norm_eps": 0.1},
        )
    ),
    *(
        ("mamba2", option)
        for option in (
            {"expand": 3},
            {"head_dim": 16},
            {"state_size": 5},
            {"head_dim": 16, "n_groups": 2},
            {"convolution_width": 2},
            {"dt_max": 1.0},
            {"dt_min": 0.1},
            {"norm_eps": 0.1},
        )
    ),
]


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[f"{name}-{option}" for name, option in OPTIONS])
def test_an_option_changes_the_layer_and_keeps_the_contract(name: str, option: dict[str, Any]) -> None:
    mixer, x = make(name, **option), make_tokens()
    y, _ = mixer(x)
    assert (y - make(name)(x)[0]).abs().max() > 1e-3
    assert_same(by_steps(mixer, x), y)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("gated_deltanet", {"expand_k": 0.7}, "expand_k=0.7 of 32 channels is no whole number"),
        ("gated_deltanet", {"head_dim": 7}, "head_dim=7 does not divide the width 24"),
        ("gated_deltanet", {"feature_map": "gelu"}, "feature_map 'gelu' is not one of silu"),
        ("gated_deltanet", {"dt_min": 0.2}, "dt_min=0.2, dt_max=0.1: step sizes are positive"),
        ("retnet", {"num_heads": 32}, "head_dim=1: rotary positions turn pairs of channels; choose an even number"),
        ("retnet", {"expand_v": 0.01}, "expand_v=0.01 of 32 channels is no whole number of at least 1"),
        ("gla", {"num_heads": 5}, "num_heads=5 does not divide the width 16"),
        ("gla", {"gate_rank": 0}, "gate_rank=0, gate_temperature=16.0: both must be positive"),
        ("hgrn2", {"lower_bound": 1.0}, "lower_bound=1.0 must be at least 0 and below 1"),
        ("mamba2", {"n_groups": 2}, "n_groups=2 does not divide the 1 heads"),
        ("mamba2", {"state_size": 0}, "state_size=0 must be a whole number of at least 1"),
    ],
)
def test_options_that_make_no_layer_are_refused(name: str, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixers.create(name, D_MODEL, **option)


@pytest.mark.parametrize("name", ["gated_deltanet", "mamba2"])
def test_decays_start_as_in_mamba2(name: str) -> None:
    mixer = mixers.create(name, 256, head_dim=4, dt_min=0.01, dt_max=0.05)
    rate, step = mixer.A_log.exp(), functional.softplus(mixer.dt_bias)
    assert rate.numel() == mixer.num_heads >= 48
    assert rate.min() >= 1
    assert rate.max() <= 16
    assert rate.std() > 3
    assert step.min() >= 0.0099
    assert step.max() <= 0.0501
    assert {"A_log", "dt_bias"} <= no_weight_decay(mixer)


@pytest.mark.parametrize("name", ["gated_deltanet", "retnet", "gla", "hgrn2", "mamba2"])
@cases("width", [16, 24, 32, 64, 96, 192, 384, 768])
def test_common_widths_need_no_option(name: str, width: int) -> None:
    with torch.device("meta"):
        mixer = mixers.create(name, width)
    assert mixer.initial_state(1, device="meta").memory.dim() == 4


def test_gated_deltanet_has_the_parameters_of_mamba2() -> None:
    mixer = mixers.create("gated_deltanet", 256)
    projections = mixer.in_proj.weight.numel() + mixer.out_proj.weight.numel()
    assert projections == 6 * 256**2 + 256 * 2 * mixer.num_heads
    assert (mixer.num_heads, mixer.key_dim, mixer.value_dim) == (2, 96, 192)


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


def test_retnet_does_not_know_where_a_sequence_starts() -> None:
    mixer, x = make("retnet"), make_tokens()
    late = mixer.initial_state(2, dtype=x.dtype)._replace(position=torch.tensor([50, 7]))
    y, state = mixer(x, late)
    torch.testing.assert_close(y, mixer(x)[0], rtol=1e-8, atol=1e-9)
    assert state.position.tolist() == [50 + TOKENS, 7 + TOKENS]


def test_gla_with_open_gates_is_linear_attention() -> None:
    mixer, x = make("gla"), make_tokens()
    mixer.decay_proj.bias.data.fill_(1e3)
    q, k, v, _, _ = mixer.in_proj(x).split([16, 16, 32, 32, 16], dim=-1)
    q, k, v = (y.unflatten(-1, (4, -1)) for y in (q, k, v))
    _, expected = linear_attention(q, k, v, output_final_state=True)
    assert expected is not None
    assert_same(mixer(x)[1].memory, expected)


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


def test_hgrn2_memory_is_an_average_of_the_values() -> None:
    """Gate and key sum to one: each row of the memory is a weighted mean of zero and the values so far."""
    mixer, x = make("hgrn2"), 5 * make_tokens(1, 300)
    v = mixer.in_proj(x)[..., 2 * D_MODEL :]
    _, state = mixer(x)
    assert (state.memory[0, 0] <= v.amax((0, 1)).clamp(min=0)).all()
    assert (state.memory[0, 0] >= v.amin((0, 1)).clamp(max=0)).all()


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


MEASURES = {
    "deltanet": {"state_norm", "gate_saturation", "key_write_norm"},
    "gated_deltanet": {"state_norm", "gate_saturation", "key_write_norm"},
    "gla": {"state_norm", "gate_saturation"},
    "hgrn2": {"state_norm", "gate_saturation"},
    "linear_attention": {"state_norm"},
    "longhorn": {"state_norm", "gate_saturation"},
    "longhorn_exact": {"state_norm", "gate_saturation"},
    "mamba": {"state_norm", "gate_saturation"},
    "mamba2": {"state_norm", "gate_saturation"},
    "retnet": {"state_norm", "gate_saturation"},
}


def measure(mixer: Any, x: Tensor, **options: Any) -> dict[str, Tensor]:
    mixer.observed = {}
    mixer(x, **options)
    observed, mixer.observed = mixer.observed, None
    return observed


@pytest.mark.parametrize("name", MEASURES)
def test_a_watched_scan_reports_and_computes_the_same(name: str) -> None:
    mixer, x = make(name), make_tokens()
    y, state = mixer(x)
    observed = measure(mixer, x)
    assert observed.keys() == MEASURES[name]
    norms = state.memory.flatten(0, -3).square().sum((-2, -1)).sqrt()
    torch.testing.assert_close(observed["state_norm"], norms.mean().float())
    assert 0 <= observed.get("gate_saturation", 0) <= 1
    assert torch.equal(mixer(x)[0], y)


@pytest.mark.parametrize("name", MEASURES)
def test_padding_is_not_measured(name: str) -> None:
    mixer, x = make(name), make_tokens(1)
    real = torch.arange(TOKENS)[None] < 8
    padded, alone = measure(mixer, x, mask=real), measure(mixer, x[:, :8])
    for label, value in alone.items():
        torch.testing.assert_close(padded[label], value)


def test_key_write_norm_is_the_norm_of_what_is_written() -> None:
    """For one token with a memory of zero, S = β k vᵀ, so the norm of β k kᵀ is that of S where v = k."""
    for option, strongest in (({}, 1.0), ({"negative_eigenvalues": True}, 2.0)):
        mixer, x = make("deltanet", num_heads=1, **option), make_tokens()
        beta = strongest * mixer.in_proj(x)[..., -1].sigmoid()
        torch.testing.assert_close(measure(mixer, x)["key_write_norm"], beta.mean().float())
    mixer = make("gated_deltanet", num_heads=1, key_norm="l1")
    assert measure(mixer, make_tokens())["key_write_norm"] < 0.5, "keys of l1 norm one are shorter in l2"


def test_gate_saturation_counts_gates_near_zero_and_one() -> None:
    x = make_tokens()
    assert measure(make("retnet", num_heads=4), x)["gate_saturation"] == 0.5  # 1 - 2^-7 and 1 - 2^-8
    mixer = make("longhorn")
    mixer.rate_proj.bias.data.copy_(torch.tensor([9.0, -9.0, 0.0, 0.0]).repeat(16))
    assert measure(mixer, x)["gate_saturation"] == 0.5
    mixer = make("mamba")
    mixer.A_log.data.fill_(-20.0)
    assert measure(mixer, x)["gate_saturation"] == 1
    mixer = make("deltanet", num_heads=1, negative_eigenvalues=True)
    mixer.in_proj.weight.data[-1] = 0  # β = 1, in the middle of its range
    assert measure(mixer, x)["gate_saturation"] == 0
