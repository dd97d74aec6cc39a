"""RWKV-6: hooks of the norm, which the layer calls, and which pruning uses."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import prune

from longseq import mixers


def test_the_norm_is_called() -> None:
    torch.manual_seed(0)
    mixer: Any = mixers.create("rwkv6", 16).double()
    torch.nn.init.normal_(mixer.norm.bias)
    x = torch.randn(2, 21, 16, dtype=torch.float64)
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
