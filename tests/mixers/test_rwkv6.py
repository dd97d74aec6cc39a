"""RWKV-6: the layer is the published recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import prune

from longseq import mixers

D_MODEL, TOKENS = 16, 21


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    mixer = mixers.create("rwkv6", D_MODEL, **options).double()
    with torch.no_grad():
        for part in (mixer.shift_down.weight, mixer.shift_up, mixer.decay_down.weight, mixer.decay_up.weight):
            part.mul_(50)  # so that the low-rank terms matter
        mixer.norm.weight.normal_()
        mixer.norm.bias.normal_()
    return mixer


def make_tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def naive(m: Any, x: Tensor) -> Tensor:
    """One token at a time, in the paper's order."""
    outputs = []
    memory = x.new_zeros(x.shape[0], m.num_heads, m.head_dim, m.head_dim)
    last = torch.zeros_like(x[:, 0])
    for token in x.unbind(1):
        change = last - token
        hidden = torch.tanh((token + change * m.shift_base) @ m.shift_down.weight.T).chunk(5, dim=-1)
        mixed = [
            token + change * (base + low @ up) for base, low, up in zip(m.shift_bases, hidden, m.shift_up, strict=True)
        ]
        decay = m.decay_base + torch.tanh(mixed[0] @ m.decay_down.weight.T) @ m.decay_up.weight.T
        w = torch.exp(-torch.exp(decay)).unflatten(-1, (m.num_heads, -1))
        k, v, r = (
            layer(part).unflatten(-1, (m.num_heads, -1))
            for layer, part in zip((m.key, m.value, m.receptance), mixed[1:4], strict=True)
        )
        written = k.unsqueeze(-1) * v.unsqueeze(-2)
        o = (r.unsqueeze(-1) * (m.bonus.unsqueeze(-1) * written + memory)).sum(-2)
        memory = w.unsqueeze(-1) * memory + written
        normed = functional.group_norm(o.flatten(1), m.num_heads, m.norm.weight, m.norm.bias, m.norm.eps)
        outputs.append(m.out_proj(normed * functional.silu(m.gate(mixed[4]))))
        last = token
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_heads": 4}, {"head_dim": 8}, {"shift_rank": 3, "decay_rank": 5}, {"norm_eps": 1.0}],
    ids=str,
)
def test_it_is_the_published_recurrence(options: dict[str, Any]) -> None:
    mixer = make(**options)
    x = make_tokens()
    torch.testing.assert_close(mixer(x)[0], naive(mixer, x), rtol=1e-9, atol=1e-10)


def test_the_norm_is_called() -> None:
    mixer, x = make(), make_tokens()
    seen: list[int] = []
    mixer.norm.register_forward_hook(lambda *_: seen.append(1))
    prune.identity(mixer.norm, "weight")  # its hook computes the weight again in each call
    for _ in range(2):
        expected = mixer(x)[0]
        expected.sum().backward()
    with torch.no_grad():
        mixer.norm.weight_orig.mul_(2)
        mixer.norm.bias.mul_(2)
    torch.testing.assert_close(mixer(x)[0], 2 * expected)
    mixer.step(x[:, 0], mixer.initial_state(2, dtype=torch.float64))
    assert len(seen) == 4
