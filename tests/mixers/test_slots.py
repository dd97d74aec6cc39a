"""Gated slot attention and ABC: logits of any size, and pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longseq import mixers
from longseq.mixers import ScanOptions

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


def test_extreme_logits_are_safe() -> None:
    """The running normaliser: a late token that outweighs all earlier ones by e^1000, then tokens of little weight."""
    for dtype in (torch.float32, torch.float64):
        mixer, x = make("abc").to(dtype), make_tokens(1, 7).to(dtype)
        projected = mixer.project_in(x).detach()
        projected[..., 3 * D_MODEL :] = torch.tensor([-1e3, 0, 0, 1e3, 0, 990, 1e4])[None, :, None]
        projected.requires_grad_()
        y, state = mixer.scan(projected)
        v = functional.silu(projected[..., 2 * D_MODEL : 3 * D_MODEL]).unflatten(-1, (4, -1))
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
    expected = forward.scan(projected, None, ScanOptions(None, mask))[0]
    expected = expected + backward.scan(projected, None, ScanOptions(None, mask, True))[0]
    actual = forward.scan_pair(backward, projected, mask)
    torch.testing.assert_close(actual[mask], expected[mask])
