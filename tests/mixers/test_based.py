"""Based: its features give the Taylor series of the exponential."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longseq import mixers
from longseq.mixers.based import taylor_features


@pytest.mark.parametrize("dim", [1, 2, 16])
def test_features_give_the_series(dim: int) -> None:
    x, y = torch.randn(2, 50, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = (x * y).sum(-1) / dim**0.5
    weights = (taylor_features(x) * taylor_features(y)).sum(-1)
    torch.testing.assert_close(weights, 1 + score + score.square() / 2)
    assert weights.min() >= 0.5 - 1e-12
    assert taylor_features(x).shape[-1] == 1 + dim + dim * (dim + 1) // 2


@pytest.mark.parametrize(
    "options", [{}, {"feature_dim": 5}, {"num_heads": 4}, {"head_dim": 16}, {"eps": 40.0}], ids=str
)
def test_it_is_attention_with_these_weights(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mixer: Any = mixers.create("based", 32, **options).double()
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    keys = mixer.num_heads * mixer.feature_dim
    q, k, v = mixer.in_proj(x).split([keys, keys, 32], dim=-1)
    q, k, v = (part.unflatten(-1, (mixer.num_heads, -1)) for part in (q, k, v))
    score = torch.einsum("bthf,bshf->bhts", q, k) / mixer.feature_dim**0.5
    weights = (1 + score + score.square() / 2).tril()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(mixer.eps)
    expected = mixer.out_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(-2))
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-9, atol=1e-10)
