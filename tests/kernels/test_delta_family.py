"""The delta rule of each mixer of the family: laws, special cases, and three tokens computed by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longseq.kernels import delta_rule, delta_rule_step

double = partial(torch.tensor, dtype=torch.float64)


def draw(tokens: int = 11, width: int = 4, **changes: Tensor | None) -> dict[str, Tensor]:
    """Random inputs `[1, T, 2, ...]` with unit keys, beta up to 2 and gates per channel, less those that are None."""
    torch.manual_seed(0)
    shape = (1, tokens, 2, width)
    q, k, v, write_key, value_key = torch.randn(5, *shape, dtype=torch.float64)
    beta, g = 2 * torch.rand(shape[:3], dtype=torch.float64), -torch.rand(shape, dtype=torch.float64)
    k = F.normalize(k, dim=-1)
    named = {"q": q, "k": k, "v": v, "beta": beta, "write_key": write_key, "value_key": value_key, "g": g, **changes}
    return {name: x for name, x in named.items() if x is not None}


@pytest.mark.parametrize("gate", [0.0, -1e-3, -5.0, -40.0, -1e4])
@pytest.mark.parametrize("tokens", [1, 53, 65])
def test_chunks_in_float32_of_correlated_keys_and_any_gate(gate, tokens):
    inputs = draw(tokens, 16)
    inputs["k"] = F.normalize(inputs["k"][:, :1] + 0.1 * inputs["k"], dim=-1)
    inputs["write_key"], inputs["beta"] = inputs["k"], torch.full_like(inputs["beta"], 2)
    inputs["g"] = torch.where(torch.arange(16) % 3 == 0, 0.0, gate).double().expand_as(inputs["g"]).contiguous()
    exact, _ = delta_rule(**inputs, backend="reference")
    found, _ = delta_rule(**{name: x.float() for name, x in inputs.items()})
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


# Three tokens of one head, K = 2 and V = 1, with q = k and scale 1.
KEYS = double([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
VALUES = double([[1.0], [2.0], [-1.0]])
BETA = double([1.0, 0.5, 2.0])
CHANNELS = double([[1.0, 1.0], [0.5, 1.0], [1.0, 0.25]]).log()
HEADS = double([1.0, 0.5, 0.25]).log()
ERASE = double([[1.0, 1.0], [0.5, 1.0], [2.0, 1.0]])
BY_HAND = {
    "kda": ({"beta": BETA, "g": CHANNELS}, [1, 1.15, -2.17], [1.01, -2.17]),
    "gated_deltanet": ({"beta": BETA, "g": HEADS}, [1, 1.15, -2.17], [0.2525, -2.17]),
    "gdn2": (
        {"k": ERASE * KEYS, "write_key": KEYS, "v": double([[1.0], [0.5], [1.0]]) * VALUES, "g": CHANNELS},
        [1, 1.15, -1],
        [1.01, -1],
    ),
    "rwkv7": (
        {"write_key": ERASE * KEYS, "value_key": 2 * KEYS, "g": CHANNELS, "read_before_decay": True},
        [2, 3.616, -3.68],
        [3.04, -3.68],
    ),
    "comba": (
        {"k": KEYS / 2, "write_key": KEYS, "beta": BETA, "g": HEADS, "read_before_decay": True},
        [1, 1.15, -2.51],
        [0.2525, -2.51],
    ),
}


@pytest.mark.parametrize("mixer", BY_HAND)
def test_three_tokens_by_hand(mixer):
    changes, outputs, last = BY_HAND[mixer]
    named = {"q": KEYS, "k": KEYS, "v": VALUES, **changes}
    call = {name: x[None, :, None] if isinstance(x, Tensor) else x for name, x in named.items()}
    state = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    for options in ({"backend": "reference"}, {"chunk_size": 2}, {"chunk_size": 4}):
        o, final = delta_rule(**call, initial_state=state, output_final_state=True, **options)
        torch.testing.assert_close(o.flatten(), double(outputs))
        torch.testing.assert_close(final.flatten(), double(last))
    for t, expected in enumerate(outputs):
        token = {name: x[:, t] if isinstance(x, Tensor) else x for name, x in call.items()}
        o, state = delta_rule_step(**token, state=state)
        torch.testing.assert_close(o.flatten(), double([expected]))


def test_three_steps_of_one_token_by_hand():
    """Gated DeltaProduct: queries of 0 at all steps but the last, and a decay at the first."""
    g = double([0.5, 1.0, 1.0]).log()
    call = {"q": KEYS * double([[0], [0], [1]]), "k": KEYS, "v": VALUES, "beta": BETA, "g": g}
    state = double([[4.0], [0.0]])[None, None]
    o, final = delta_rule(**{name: x[None, :, None] for name, x in call.items()}, initial_state=state,
                          output_final_state=True)  # fmt: skip
    torch.testing.assert_close(o[0, -1].flatten(), double([-2.56]))
    torch.testing.assert_close(final.flatten(), double([1.42, -2.56]))


def test_a_call_needs_a_strength():
    inputs = draw(beta=None, write_key=None)
    with pytest.raises(ValueError, match="beta or write_key"):
        delta_rule(**inputs)
