"""The orthogonal recurrence's Triton kernels, interpreted: every objective, and TTT in chunks."""

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


def with_objective(inputs, objective, **options):
    return replace(inputs, options={**inputs.options, "objective": objective, **options})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ttt", "gated"])
def test_chunks_equal_their_definition(interpreted, variant):
    inputs = with_objective(make_inputs(OP, variant, batch=1, tokens=7, sizes={"H": 1}), "ttt")
    assert_as_accurate_as_torch(inputs, gradients(inputs, backend="reference", chunk_size=3), chunk_size=3)


@pytest.mark.parametrize("tokens", [1, 33])
def test_chunks_of_many_slots(interpreted, tokens):
    inputs = make_inputs(OP, "gated", batch=1, tokens=tokens, sizes={"H": 1, "D": 20, "M": 19})
    assert_as_accurate_as_torch(with_objective(inputs, "ttt"), chunk_size=17)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gated", "ttt"])
def test_chunks_of_more_than_a_few_tokens(interpreted, variant):
    inputs = make_inputs(OP, variant, batch=1, tokens=37, sizes={"H": 1})
    inputs.initial_state[..., 1] = 0
    assert_as_accurate_as_torch(with_objective(inputs, "ttt"), chunk_size=18)


@pytest.mark.parametrize(("chunk_size", "dtype"), [(4, torch.float16), (17, torch.float32)])
@pytest.mark.slow
def test_more_slots_and_channels_than_a_block(interpreted, chunk_size, dtype):
    inputs = make_inputs(OP, "gated", batch=1, tokens=2 * chunk_size + 1, dtype=dtype, sizes={"H": 1, "D": 66, "M": 70})
    inputs = with_objective(inputs, "ttt")
    exact = gradients(inputs.map(torch.Tensor.double), backend="torch", chunk_size=chunk_size)
    plain, actual = (gradients(inputs, backend=name, chunk_size=chunk_size) for name in ("torch", "triton"))
    for name, value in exact.items():
        assert_accurate(actual[name], plain[name], value, name)


def test_unnormalized_slots(interpreted, short_stretches):
    inputs = make_inputs(OP, "gated", batch=1, tokens=6)
    assert_as_accurate_as_torch(with_objective(inputs, "encode", normalize=False))


@pytest.mark.parametrize(
    ("variant", "chunk_size"), [("gated", 1), ("unnormalized", 1), ("encode", 1), ("ttt", 1), ("ttt", 4)]
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
    inputs = with_objective(inputs, "ttt")
    options = {"cu_seqlens": bounds, "chunk_size": chunk_size}
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", **options)
    actual = gradients(inputs, backend="triton", **options)
    for name, value in exact.items():
        # The arithmetic is float32; the interpreter truncates where it converts to bfloat16.
        assert error(actual[name], value) <= 2 * torch.finfo(actual[name].dtype).eps + 1e-5, name


@pytest.mark.parametrize(("variant", "tokens", "chunk_size"), [("gated", 6, 1), ("ttt", 19, 17)])
def test_half_of_the_rows_is_read_from_the_end(interpreted, short_stretches, variant, tokens, chunk_size):
    # Four heads for three programs of the exact form's backward pass.
    inputs = make_inputs(OP, variant, tokens=tokens, sizes={} if variant == "gated" else {"H": 1})
    exact = gradients(inputs, run=Inputs.run_both_ways, backend="reference", chunk_size=chunk_size)
    assert_as_accurate_as_torch(inputs, exact, chunk_size=chunk_size, reverse="second_half")


@pytest.mark.parametrize(("variant", "chunk_size"), [("gated", 1), ("ttt", 4), ("ttt", 17)])
def test_packed_segments_read_from_their_ends(interpreted, short_stretches, variant, chunk_size):
    bounds = torch.tensor(BOUNDS)
    inputs = make_inputs(OP, variant, tokens=BOUNDS[-1], segments=len(BOUNDS) - 1, sizes={"H": 1})
    exact = gradients(inputs, run=Inputs.run_reversed, backend="reference", cu_seqlens=bounds, chunk_size=chunk_size)
    assert_as_accurate_as_torch(inputs, exact, cu_seqlens=bounds, chunk_size=chunk_size, reverse=True)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_loss_on_the_state_alone(interpreted, chunk_size):
    def state_gradients(backend, dtype):
        inputs = with_objective(make_inputs(OP, "gated", batch=1, tokens=6, dtype=dtype), "ttt")
        inputs = inputs.map(lambda x: x.requires_grad_())
        _, state = inputs.run(backend=backend, chunk_size=chunk_size)
        tensors = [x for name, x in inputs.tensors.items() if name != "q"]
        return torch.autograd.grad(state[..., 0].sum(), tensors)

    actual, exact = state_gradients("triton", torch.float32), state_gradients("reference", torch.float64)
    for ours, theirs in zip(actual, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_graph_holds_the_chunks_whole(interpreted):
    inputs = with_objective(make_inputs(OP, "gated", batch=1, tokens=5, dtype=torch.float32), "ttt")
    torch._dynamo.reset()
    compiled = torch.compile(inputs.run, fullgraph=True, backend="aot_eager")
    actual, expected = (run(backend="triton", chunk_size=3) for run in (compiled, inputs.run))
    torch.testing.assert_close(actual, expected)
