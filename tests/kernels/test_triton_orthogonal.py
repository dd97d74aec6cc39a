"""The orthogonal recurrence's Triton kernels, interpreted: every objective, exact and in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_inputs import Inputs, assert_accurate, error, gradients, make_inputs

OP = "orthogonal_recurrence"
BOUNDS = (0, 3, 3, 13, 15)


@pytest.fixture
def short_stretches(monkeypatch):
    """Checkpoints and scratch memory so small that small inputs have several stretches of tokens and several heads a
    program.
    """
    from longseq.kernels.orthogonal_recurrence import triton_orthogonal

    monkeypatch.setattr(triton_orthogonal, "CHECKPOINT", 4)
    monkeypatch.setattr(triton_orthogonal, "SCRATCH", 300)


def assert_as_accurate_as_torch(inputs, exact=None, **options):
    """Compare outputs, final state and gradients with float64; the torch form's error in float32 sets the limit."""
    exact = gradients(inputs, backend="torch", **options) if exact is None else exact
    single = inputs.map(torch.Tensor.float)
    plain, actual = gradients(single, backend="torch", **options), gradients(single, backend="triton", **options)
    for name, value in exact.items():
        assert_accurate(actual[name], plain[name], value, name)


def unnormalized(inputs, objective):
    return replace(inputs, options={**inputs.options, "objective": objective, "normalize": False})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["encode", "ttt", "gated", "unnormalized"])
def test_chunks_equal_their_definition(interpreted, variant):
    inputs = make_inputs(OP, variant, batch=1, tokens=7, sizes={"H": 1})
    assert_as_accurate_as_torch(inputs, gradients(inputs, backend="reference", chunk_size=3), chunk_size=3)


@pytest.mark.parametrize(("objective", "tokens"), [("decode", 1), ("encode", 33), ("ttt", 33)])
def test_chunks_of_many_slots(interpreted, objective, tokens):
    inputs = make_inputs(OP, "gated", batch=1, tokens=tokens, sizes={"H": 1, "D": 20, "M": 19})
    inputs = replace(inputs, options={**inputs.options, "objective": objective})
    assert_as_accurate_as_torch(inputs, chunk_size=17)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "ttt", "unnormalized"])
def test_chunks_of_more_than_a_few_tokens(interpreted, variant):
    inputs = make_inputs(OP, variant, batch=1, tokens=37, sizes={"H": 1})
    inputs.initial_state[..., 1] = 0
    assert_as_accurate_as_torch(inputs, chunk_size=18)


@pytest.mark.parametrize(
    ("objective", "chunk_size", "dtype"), [("decode", 4, torch.float16), ("encode", 17, torch.float32)]
)
@pytest.mark.slow
def test_more_slots_and_channels_than_a_block(interpreted, objective, chunk_size, dtype):
    inputs = make_inputs(OP, "gated", batch=1, tokens=2 * chunk_size + 1, dtype=dtype, sizes={"H": 1, "D": 66, "M": 70})
    inputs = replace(inputs, options={**inputs.options, "objective": objective})
    exact = gradients(inputs.map(torch.Tensor.double), backend="torch", chunk_size=chunk_size)
    plain, actual = (gradients(inputs, backend=name, chunk_size=chunk_size) for name in ("torch", "triton"))
    for name, value in exact.items():
        assert_accurate(actual[name], plain[name], value, name)


@pytest.mark.parametrize(("objective", "chunk_size"), [("encode", 1), ("encode", 17), ("similarity", 3)])
def test_unnormalized_slots(interpreted, short_stretches, objective, chunk_size):
    inputs = make_inputs(OP, "gated", batch=1, tokens=max(6, 2 * chunk_size))
    assert_as_accurate_as_torch(unnormalized(inputs, objective), chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("variant", "chunk_size"), [("gated", 1), ("gated", 4), ("unnormalized", 4), ("encode", 4), ("ttt", 1)]
)
def test_empty_slots_and_zero_keys(interpreted, short_stretches, variant, chunk_size):
    inputs = make_inputs(OP, variant, batch=1, tokens=9, sizes={"H": 1})
    inputs.initial_state[..., 1] = 0
    inputs.sequences["k"][:, 2:5] = 0
    assert_as_accurate_as_torch(inputs, chunk_size=chunk_size)


@pytest.mark.parametrize(("chunk_size", "dtype"), [(1, torch.bfloat16), (4, torch.float16)])
def test_packed_half_precision(interpreted, short_stretches, chunk_size, dtype):
    bounds = torch.tensor(BOUNDS)
    inputs = make_inputs(OP, "gated", tokens=BOUNDS[-1], segments=len(BOUNDS) - 1, dtype=dtype, sizes={"H": 1})
    options = {"cu_seqlens": bounds, "chunk_size": chunk_size}
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", **options)
    actual = gradients(inputs, backend="triton", **options)
    for name, value in exact.items():
        # The arithmetic is float32; the interpreter truncates where it converts to bfloat16.
        assert error(actual[name], value) <= 2 * torch.finfo(actual[name].dtype).eps + 1e-5, name


@pytest.mark.parametrize(("variant", "tokens", "chunk_size"), [("gated", 6, 1), ("unnormalized", 19, 17)])
def test_half_of_the_rows_is_read_from_the_end(interpreted, short_stretches, variant, tokens, chunk_size):
    # Four heads for three programs of the exact form's backward pass.
    inputs = make_inputs(OP, variant, tokens=tokens, sizes={} if variant == "gated" else {"H": 1})
    exact = gradients(inputs, run=Inputs.run_both_ways, backend="reference", chunk_size=chunk_size)
    assert_as_accurate_as_torch(inputs, exact, chunk_size=chunk_size, reverse="second_half")


@pytest.mark.parametrize(("variant", "chunk_size"), [("plain", 1), ("gated", 4), ("ttt", 17)])
def test_packed_segments_read_from_their_ends(interpreted, short_stretches, variant, chunk_size):
    bounds = torch.tensor(BOUNDS)
    inputs = make_inputs(OP, variant, tokens=BOUNDS[-1], segments=len(BOUNDS) - 1, sizes={"H": 1})
    exact = gradients(inputs, run=Inputs.run_reversed, backend="reference", cu_seqlens=bounds, chunk_size=chunk_size)
    assert_as_accurate_as_torch(inputs, exact, cu_seqlens=bounds, chunk_size=chunk_size, reverse=True)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_loss_on_the_state_alone(interpreted, chunk_size):
    def state_gradients(backend, dtype):
        inputs = make_inputs(OP, "gated", batch=1, tokens=6, dtype=dtype).map(lambda x: x.requires_grad_())
        _, state = inputs.run(backend=backend, chunk_size=chunk_size)
        tensors = [x for name, x in inputs.tensors.items() if name != "q"]
        return torch.autograd.grad(state[..., 0].sum(), tensors)

    actual, exact = state_gradients("triton", torch.float32), state_gradients("reference", torch.float64)
    for ours, theirs in zip(actual, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_graph_holds_the_chunks_whole(interpreted):
    inputs = make_inputs(OP, "gated", batch=1, tokens=5, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(inputs.run, fullgraph=True, backend="aot_eager")
    actual, expected = (run(backend="triton", chunk_size=3) for run in (compiled, inputs.run))
    torch.testing.assert_close(actual, expected)
