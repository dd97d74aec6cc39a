"""Heads of keys and values that several heads of queries share: as if each head of queries had its own copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers
from longseq.mixers import make_reading
from longseq.state import state_tensors

D_MODEL, HEADS, GROUPS, WIDTH = 16, 4, 2, 6

# The options of a layer whose heads together are wider than d_model, and the widths of the parts of its input
# projection after the queries, for a head of keys and values.
LAYERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "attention": ({"head_dim": WIDTH, "rotary": True}, [WIDTH, WIDTH]),
    "gsa": ({"head_dim": WIDTH, "num_slots": 3}, [WIDTH, WIDTH, 3]),
    "gla": ({"expand_k": 1.5, "expand_v": 1.5, "gate_rank": 2, "output_gate": False}, [WIDTH, WIDTH]),
    "retnet": ({"head_dim": WIDTH, "expand_v": 1.0, "output_gate": False, "feature_map": "relu"}, [WIDTH, WIDTH]),
}


def copies(x: Tensor) -> Tensor:
    """Repeat the rows of each group for the heads of queries that share it."""
    return x.unflatten(0, (GROUPS, -1)).repeat_interleave(HEADS // GROUPS, 0).flatten(0, 1)


def pair(name: str) -> tuple[Any, Any]:
    """A layer with groups, and one in which every head of queries has a copy of its keys and values."""
    options, widths = LAYERS[name]
    torch.manual_seed(0)
    grouped, plain = (
        mixers.create(name, D_MODEL, num_heads=HEADS, num_kv_heads=groups, **options).double()
        for groups in (GROUPS, HEADS)
    )
    weights = grouped.state_dict()
    for key in ("in_proj.weight", "in_proj.bias"):
        if key in weights:
            rows = [HEADS * WIDTH, *(GROUPS * width for width in widths)]
            queries, *shared, rest = weights[key].split([*rows, weights[key].shape[0] - sum(rows)])
            weights[key] = torch.cat([queries, *map(copies, shared), rest])
    for key in ("decay_proj.weight", "decay_proj.bias"):
        if key in weights:
            weights[key] = copies(weights[key])
    plain.load_state_dict(weights)
    return grouped, plain


@pytest.mark.parametrize("name", LAYERS)
def test_a_group_shares_keys_and_values(name: str) -> None:
    grouped, plain = pair(name)
    x = torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    expected, _ = plain(x)
    torch.testing.assert_close(grouped(x)[0], expected)
    assert sum(p.numel() for p in grouped.parameters()) < sum(p.numel() for p in plain.parameters())
    y, state = grouped(x[:, :4])
    parts = [y]
    for token in x[:, 4:].unbind(1):
        y, state = grouped.step(token, state)
        parts.append(y.unsqueeze(1))
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    empty = state_tensors(grouped.initial_state(2, dtype=torch.float64))
    assert name == "attention" or [t.shape for _, t in empty] == [t.shape for _, t in state_tensors(state)]


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_a_head_of_keys_serves_several_of_values(direction: str, width: int) -> None:
    """Gated DeltaNet with more heads of values is the one in which each has a copy of its queries and keys."""
    torch.manual_seed(0)
    common = {"direction": direction, "layer": 0, "share": "none", "merge": "sum", "backend": "auto"}
    shared, plain = (
        make_reading(
            "gated_deltanet", D_MODEL, **common,
            options={"num_heads": heads, "num_value_heads": 4, "expand_k": heads * WIDTH / D_MODEL,
                     "expand_v": 0.5, "convolution_width": width},
        ).double()
        for heads in (2, 4)
    )  # fmt: skip
    weights = {}
    for name, weight in shared.state_dict().items():
        if name.endswith(("in_proj.weight", "convolution.weight")):
            q, k, rest = weight.split([2 * WIDTH, 2 * WIDTH, weight.shape[0] - 4 * WIDTH])
            weight = torch.cat([copies(q), copies(k), rest])
        weights[name] = weight
    plain.load_state_dict(weights)
    x = torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    expected, _ = plain(x)
    torch.testing.assert_close(shared(x)[0], expected)
    if direction == "forward":
        state, parts = shared.initial_state(2, dtype=torch.float64), []
        for token in x.unbind(1):
            y, state = shared.step(token, state)
            parts.append(y)
        torch.testing.assert_close(torch.stack(parts, 1), expected)
