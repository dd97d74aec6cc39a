"""The orthogonal recurrence's own mathematics: its gradient steps, its slots' lengths, and the chunk approximation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import cases
from kernel_inputs import (
    Inputs,
    assert_accurate,
    assert_equal_up_to_rounding,
    gradients,
    make_inputs,
)

from longseq.kernels import orthogonal_recurrence, orthogonal_recurrence_step
from longseq.kernels.orthogonal_recurrence import OBJECTIVES

OP = "orthogonal_recurrence"


def make_chunked(gated, **options):
    """TTT, which alone has chunks, with or without gates."""
    if not gated:
        return make_inputs(OP, "ttt", **options)
    inputs = make_inputs(OP, "gated", **options)
    return replace(inputs, options={**inputs.options, "objective": "ttt"})


def assert_same(actual, expected):
    for name, value in expected.items():
        assert_equal_up_to_rounding(actual[name], value, name)


def compression_loss(objective, state, k, v):
    """The loss of the paper's equations 6, 9 and 11, or of TTT; state [D, M], k [M], v [D]."""
    slots = torch.nn.functional.normalize(state, dim=0)
    if objective == "decode":
        return (slots @ k - v).square().sum() / 2
    if objective == "encode":
        return (slots.T @ v - k).square().sum() / 2
    if objective == "similarity":
        return -(slots.T @ v) @ k
    return (torch.nn.functional.normalize(state @ k, dim=0) - v).square().sum() / 2


@cases("objective", OBJECTIVES)
@cases("normalize", [True, False])
def test_a_step_descends_the_loss(objective, normalize):
    torch.manual_seed(0)
    state = torch.randn(5, 3, dtype=torch.float64)
    unit = normalize and objective != "ttt"
    state = (torch.nn.functional.normalize(state, dim=0) if unit else state).requires_grad_()
    q, k, v = (torch.randn(n, dtype=torch.float64) for n in (3, 3, 5))
    gamma, g = torch.tensor(0.7, dtype=torch.float64), torch.tensor(-0.2, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(compression_loss(objective, state, k, v), state)
    expected = g.exp() * state.detach() - gamma * gradient
    expected = torch.nn.functional.normalize(expected, dim=0) if unit else expected
    o, final = orthogonal_recurrence_step(
        *(x[None, None] for x in (q, k, v, gamma, state.detach())),
        g=g[None, None],
        objective=objective,
        normalize=normalize,
    )
    assert_equal_up_to_rounding(final[0, 0], expected, "state")
    assert_equal_up_to_rounding(o[0, 0], expected @ q, "output")


def test_only_ttt_has_chunks():
    with pytest.raises(ValueError, match="chunk_size is 4"):
        make_inputs(OP).run(chunk_size=4)


@pytest.mark.parametrize("gated", [False, True])
@cases("chunk_size", [2, 5, 16, 64])
def test_chunk_form_equals_its_definition(gated, chunk_size):
    inputs = make_chunked(gated, tokens=37)
    expected = gradients(inputs, backend="reference", chunk_size=chunk_size)
    assert all(value.isfinite().all() for value in expected.values())
    assert_same(gradients(inputs, backend="torch", chunk_size=chunk_size), expected)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("gated", [False, True])
def test_cuts_at_chunk_borders_do_not_matter(backend, gated):
    inputs, options = make_chunked(gated, tokens=22), {"chunk_size": 4, "backend": backend}

    def carried(inputs):
        outputs, state = [], inputs.initial_state
        for start, stop in ((0, 4), (4, 16), (16, 22)):
            output, state = inputs.cut(start, stop, state).run(**options)
            outputs.append(output)
        return torch.cat(outputs, 1), state

    assert_same(gradients(inputs, run=carried), gradients(inputs, **options))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("gated", [False, True])
def test_chunks_count_from_where_reading_begins(backend, gated):
    bounds = torch.tensor([0, 7, 7, 8, 29])
    calls = [
        (make_chunked(gated, tokens=29), True, {}),
        (make_chunked(gated, tokens=29, segments=4), True, {"cu_seqlens": bounds}),
        (make_chunked(gated, tokens=29), "second_half", {}),
    ]
    for inputs, reverse, options in calls:
        run = Inputs.run_reversed if reverse is True else Inputs.run_both_ways
        expected = gradients(inputs, run=run, backend="reference", chunk_size=4, **options)
        assert_same(gradients(inputs, backend=backend, chunk_size=4, reverse=reverse, **options), expected)


@pytest.mark.parametrize("gated", [False, True])
def test_chunks_in_float32_are_as_accurate_as_the_definition(gated):
    inputs = make_chunked(gated, tokens=150, dtype=torch.float32)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", chunk_size=8)
    peer = gradients(inputs, backend="reference", chunk_size=8)
    for name, value in gradients(inputs, chunk_size=8).items():
        assert_accurate(value, peer[name], exact[name], name)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_backward_keeps_the_root_of_the_states(chunk_size):
    inputs = make_inputs(OP, "ttt", tokens=256).map(lambda x: x.requires_grad_())
    kept: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        inputs.run(chunk_size=chunk_size)
    own = sum(x.numel() for x in inputs.tensors.values())
    states = (sum(x.numel() for x in kept.values()) - own) / inputs.initial_state.numel()
    assert states < 2 + (256 / chunk_size) ** 0.5


@pytest.mark.parametrize("variant", ["plain", "encode", "similarity", "unnormalized"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_an_empty_slot_has_finite_gradients_and_can_be_written(variant, backend):
    inputs = make_inputs(OP, variant, tokens=5)
    state = inputs.initial_state.clone()
    state[..., 1] = 0
    empty = inputs.replace({"initial_state": state})
    assert all(value.isfinite().all() for value in gradients(empty, backend=backend).values())
    assert empty.run(backend=backend)[1][..., 1].norm() > 0.1
    idle = empty.replace(
        {name: torch.zeros_like(empty.sequences[name]) for name in {"gamma", "g"} & {*empty.sequences}}
    )
    _, final = idle.run(backend=backend)
    assert_equal_up_to_rounding(final, state, "state")
    grads = gradients(idle, backend=backend)
    assert all(value.isfinite().all() for value in grads.values())


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_ttt_starts_from_a_state_of_zeros(chunk_size):
    inputs = make_inputs(OP, "ttt", tokens=12)
    inputs = inputs.replace({"initial_state": torch.zeros_like(inputs.initial_state)})
    expected = gradients(inputs, backend="reference", chunk_size=chunk_size)
    assert all(value.isfinite().all() for value in expected.values())
    assert_same(gradients(inputs, chunk_size=chunk_size), expected)


def test_slots_keep_their_length():
    """The formula √(1 + ‖Δ‖²) for the new norm would let lengths drift in float32 if values are parallel to slots."""
    torch.manual_seed(0)
    tokens, width = 64, 8
    slot = torch.zeros(1, 1, width, 1)
    slot[..., 0, 0] = 1
    v = 0.01 * torch.randn(1, tokens, 1, width) + 30 * slot[:, :, None, :, 0]
    k, gamma = torch.ones(1, tokens, 1, 1), torch.full((1, tokens, 1), 0.5)
    _, final = orthogonal_recurrence(
        k, k, v, gamma, objective="similarity", initial_state=slot, output_final_state=True
    )
    assert final is not None
    assert (final.norm(dim=-2) - 1).abs().max() < 1e-6
