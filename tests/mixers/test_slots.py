"""Gated slot attention and ABC: the meaning of their options, and where the two are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longseq import mixers

D_MODEL, TOKENS, SLOTS = 16, 19, 6


def make(name: str, **options: Any) -> mixers.Mixer:
    torch.manual_seed(0)
    mixer = mixers.create(name, D_MODEL, **{"num_slots": SLOTS, **options}).double().eval()
    with torch.no_grad():  # so that slots and gates differ from each other
        for parameter in mixer.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return mixer


def make_tokens(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randn(batch, tokens, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def project(mixer: mixers.Mixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v `[B, T, H, K]` and the logits `[B, T, H, M]`, from the weights."""
    q, k, v, logits = mixer.project_in(x).split([D_MODEL, D_MODEL, D_MODEL, 4 * SLOTS], dim=-1)
    q, k, v = (functional.silu(part).unflatten(-1, (4, -1)) for part in (q, k, v))
    return q, k, v, logits.unflatten(-1, (4, -1))


def read_out(mixer: mixers.Mixer, o: Tensor) -> Tensor:
    """W_o RMSNorm(SiLU(o)), the norm over all heads together."""
    o = functional.silu(o.flatten(-2))
    return mixer.project_out(o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention of `q [B, T, H, K]` to the slots of its own token `[B, T, H, M, ...]`."""
    weights = torch.einsum("bthk,bthmk->bthm", q, keys).softmax(-1)
    return torch.einsum("bthm,bthmv->bthv", weights, values)


def test_abc_averages_by_a_softmax_over_all_tokens_so_far() -> None:
    mixer, x = make("abc"), make_tokens()
    q, k, v, logits = project(mixer, x)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[:, :, None, None]
    share = logits[:, None].masked_fill(later, -torch.inf).softmax(2)  # [B, t, s, H, M]
    keys, values = (torch.einsum("btshm,bshk->bthmk", share, part) for part in (k, v))
    assert_same(mixer(x)[0], read_out(mixer, attend(q, keys, values)))


def test_gsa_with_the_forget_gates_of_abc_is_abc() -> None:
    abc, gsa, x = make("abc"), make("gsa"), make_tokens()
    gsa.load_state_dict(abc.state_dict())
    *_, logits = project(abc, x)
    normalizer = logits.logcumsumexp(1)
    kept = 1 - (logits - normalizer).exp()
    q_k_v = gsa.project_in(x)[..., : 3 * D_MODEL]
    # sigmoid(logit)^(1/8) = kept; the first token keeps nothing
    logit = torch.logit(kept.pow(8).clamp_min(1e-200)).flatten(-2)
    y, state = gsa.scan(torch.cat((q_k_v, logit), -1))
    expected, expected_state = abc.scan(abc.project_in(x))
    torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(state.values, expected_state.values, rtol=1e-8, atol=1e-8)


def test_extreme_logits_are_safe() -> None:
    """The running normaliser: a late token that outweighs all earlier ones by e^1000, then tokens of little weight."""
    for dtype in (torch.float32, torch.float64):
        mixer, x = make("abc").to(dtype), make_tokens(1, 7).to(dtype)
        projected = mixer.project_in(x).detach()
        projected[..., 3 * D_MODEL :] = torch.tensor([-1e3, 0, 0, 1e3, 0, 990, 1e4])[None, :, None]
        projected.requires_grad_()
        y, state = mixer.scan(projected)
        *_, v, _ = project(mixer, x)
        assert torch.allclose(state.values, v[:, -1, :, None].expand_as(state.values))
        assert torch.equal(state.normalizer, torch.full_like(state.normalizer, 1e4))
        y.square().sum().backward()
        assert projected.grad is not None
        assert projected.grad.isfinite().all()


@pytest.mark.parametrize(("name", "option"), [("gsa", {"data_dependent_gate": False}), ("abc", {"renormalize": False})])
def test_a_pair_sums_its_scans(name: str, option: dict[str, Any]) -> None:
    forward, backward = (make(name, **option) for _ in range(2))
    with torch.no_grad():
        for parameter in backward.parameters():
            parameter.add_(torch.randn_like(parameter))
    projected = forward.project_in(make_tokens()).detach()
    mask = torch.arange(projected.shape[1]) < torch.tensor([[projected.shape[1]], [11]])
    expected = forward.scan(projected, mask=mask)[0] + backward.scan(projected, mask=mask, reverse=True)[0]
    actual = forward.scan_pair(backward, projected, mask)
    torch.testing.assert_close(actual[mask], expected[mask])
