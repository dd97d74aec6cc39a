"""The rules for every operation and each of its backends, over the whole registry."""

import functools
import random
from itertools import pairwise

import pytest
import torch
from cases import cases
from kernel_inputs import (
    DIFFERENTIATED_BY_TORCH,
    Inputs,
    assert_accurate,
    assert_equal_up_to_rounding,
    error,
    gradients,
    list_forms,
    list_variants,
    make_inputs,
    results,
    takes,
    takes_chunk_size,
)

from longseq.kernels import list_ops
from longseq.kernels.dispatch import list_stepped_ops
from longseq.kernels.recurrence import each

CASES = [(op, variant) for op in list_ops() for variant in list_variants(op)]
FORMS = [(op, backend) for op in list_ops() for backend in list_forms(op)]
BACKENDS = FORMS + [(op, "reference") for op in list_ops()]
CHUNKED = [op for op in list_ops() if takes_chunk_size(op)]

DRAWS = range(10)  # of shapes and variants, for each operation and backend


def assert_same(actual, expected):
    for name, value in expected.items():
        assert_equal_up_to_rounding(actual[name], value, name)


def bounds_of(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


@functools.cache
def gradients_of_recurrence(op, variant, tokens):
    return gradients(make_inputs(op, variant, tokens=tokens), backend="reference")


@pytest.mark.slow
@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_outputs_may_be_changed_in_place(op, backend):
    inputs = make_inputs(op, tokens=37)
    leaves = {name: x.requires_grad_() for name, x in inputs.sequences.items() if x.is_floating_point()}
    inputs = inputs.replace(leaves)
    found = []
    for change in (torch.Tensor.mul_, torch.Tensor.mul):
        output, _ = inputs.run(backend=backend)
        loss = change(output, 2).square().sum()
        found.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("op", list_ops())
@cases("variant", list_variants)
@cases("tokens", [1, 37])
def test_forms_equal_the_recurrence(op, variant, tokens):
    inputs = make_inputs(op, variant, tokens=tokens)
    expected = gradients_of_recurrence(op, variant, tokens)
    assert all(value.isfinite().all() for value in expected.values())
    for backend in list_forms(op):
        assert_same(gradients(inputs, backend=backend), expected)


@pytest.mark.parametrize("op", CHUNKED)
@cases("chunk_size", [1, 2, 8, 16, 32, 128])
@pytest.mark.slow
def test_chunk_size_does_not_matter(op, chunk_size):
    for variant in list_variants(op)[:4]:
        inputs = make_inputs(op, variant, tokens=37)
        expected = gradients_of_recurrence(op, variant, 37)
        assert_same(gradients(inputs, backend="torch", chunk_size=chunk_size), expected)


@pytest.mark.parametrize("op", list_ops())
@cases("variant", lambda op: [variant for variant in list_variants(op) if "extreme" not in variant])
@pytest.mark.slow
def test_gradients_are_those_of_finite_differences(op, variant):
    inputs = make_inputs(op, variant, batch=1, tokens=6).map(lambda x: x.requires_grad_())
    options = {"chunk_size": 2} if takes_chunk_size(op) else {}

    def call(*tensors):
        returned = results(*inputs.replace(dict(zip(inputs.tensors, tensors, strict=True))).run(**options))
        return tuple(x for x in returned.values() if x.is_floating_point())

    assert torch.autograd.gradcheck(call, tuple(inputs.tensors.values()), fast_mode=True)


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_second_derivatives_are_right_or_refused(op, backend):
    inputs = make_inputs(op, list_variants(op)[0], batch=1, tokens=5).map(lambda x: x.requires_grad_())

    def penalise(backend):
        """A loss with a penalty on gradients, as for a sum: the gradient that enters the operation requires none."""
        tensors = list(inputs.tensors.values())
        output = results(*inputs.run(backend=backend))["output"]
        first = torch.autograd.grad(output.sum(), tensors, create_graph=True, allow_unused=True)
        loss = sum(x.square().sum() for x in first if x is not None and x.requires_grad) + output.square().sum()
        return torch.autograd.grad(loss, tensors, allow_unused=True)

    if op not in DIFFERENTIATED_BY_TORCH and backend != "reference":
        with pytest.raises(RuntimeError, match="has no second derivative"):
            penalise(backend)
        return
    for actual, expected in zip(penalise(backend), penalise("reference"), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_equal_up_to_rounding(actual, expected, op)


@pytest.mark.parametrize(("op", "backend"), FORMS)
def test_a_part_that_runs_again_has_the_same_gradients(op, backend):
    """Saved tensors may be read only once: torch's checkpoint runs the operation again."""
    inputs = make_inputs(op, list_variants(op)[0], tokens=5)
    expected = gradients(inputs, backend=backend)
    actual = gradients(inputs, run=Inputs.run_checkpointed, backend=backend)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
@cases("draw", DRAWS)
def test_segments_that_carry_the_state_equal_the_whole(op, backend, draw):
    chance = random.Random(f"{op} {backend} {draw}")
    tokens = chance.randint(2, 24)
    cuts = sorted(chance.sample(range(1, tokens), min(chance.randint(0, 3), tokens - 1)))
    options = {"backend": backend}
    if takes_chunk_size(op):
        options["chunk_size"] = chance.choice([2, 8, 64])
    inputs = make_inputs(op, chance.choice(list_variants(op)), batch=chance.randint(1, 3), tokens=tokens)
    whole, final_state = inputs.run(**options)
    parts, state = [], inputs.initial_state
    for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True):
        part, state = inputs.cut(start, stop, state).run(**options)
        parts.append(part)
    assert_same(results(torch.cat(parts, 1), state), results(whole, final_state))


@pytest.mark.parametrize("op", list_ops())
def test_gradients_pass_through_a_carried_state(op):
    inputs = make_inputs(op, tokens=20)
    expected = gradients(inputs)

    def carried(inputs):
        first, state = inputs.cut(0, 7).run()
        second, state = inputs.cut(7, 20, state).run()
        return torch.cat((first, second), 1), state

    assert_same(gradients(inputs, run=carried), expected)


@pytest.mark.parametrize("op", [op for op in list_ops() if op in list_stepped_ops()])
@cases("variant", list_variants)
def test_steps_equal_the_whole(op, variant):
    inputs = make_inputs(op, variant, tokens=21)
    whole, final_state = inputs.run()
    state, outputs = inputs.initial_state, []
    for t in range(inputs.tokens):
        output, state = inputs.step(t, state)
        outputs.append(output)
    assert_same(results(torch.stack(outputs, 1), state), results(whole, final_state))


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
@cases("draw", DRAWS)
def test_packed_equals_each_alone(op, backend, draw):
    chance = random.Random(f"{op} {backend} {draw}")
    # Empty sequences and sequences of one token are as frequent as all others.
    lengths = [chance.choice((0, 1, chance.randint(2, 19))) for _ in range(chance.randint(0, 4))]
    lengths.insert(chance.randint(0, len(lengths)), chance.randint(1, 19))
    dtype = chance.choice([torch.int32, torch.int64])
    bounds = bounds_of(lengths)
    inputs = make_inputs(op, chance.choice(list_variants(op)), tokens=bounds[-1], segments=len(lengths))
    outputs, states = [], []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        state = each(lambda x, row=n: x[row : row + 1], inputs.initial_state)
        if stop > start:
            output, state = inputs.cut(start, stop, state).run(backend=backend)
            outputs.append(output)
        states.append(state)
    packed, final_state = inputs.run(backend=backend, cu_seqlens=torch.tensor(bounds, dtype=dtype))
    alone = results(torch.cat(outputs, 1), each(lambda *x: torch.cat(x), *states))
    assert_same(results(packed, final_state), alone)


@pytest.mark.parametrize(("op", "backend"), FORMS)
@pytest.mark.slow
def test_packed_gradients_equal_the_recurrence(op, backend):
    lengths = [0, 17, 1, 0, 22, 0]
    cu_seqlens = torch.tensor(bounds_of(lengths))
    for variant in list_variants(op)[:4]:
        inputs = make_inputs(op, variant, tokens=sum(lengths), segments=len(lengths))
        expected = gradients(inputs, backend="reference", cu_seqlens=cu_seqlens)
        assert_same(gradients(inputs, backend=backend, cu_seqlens=cu_seqlens), expected)


@pytest.mark.parametrize(("op", "backend"), [form for form in BACKENDS if takes(form[0], "reverse")])
def test_reverse_reads_from_the_end(op, backend):
    lengths = [0, 17, 1, 0, 22, 0]
    cu_seqlens = torch.tensor(bounds_of(lengths))
    for variant in list_variants(op)[:4]:
        inputs = make_inputs(op, variant, tokens=19)
        expected = gradients(inputs, run=Inputs.run_reversed, backend="reference")
        assert_same(gradients(inputs, backend=backend, reverse=True), expected)
        inputs = make_inputs(op, variant, tokens=sum(lengths), segments=len(lengths))
        expected = gradients(inputs, run=Inputs.run_reversed, backend="reference", cu_seqlens=cu_seqlens)
        assert_same(gradients(inputs, backend=backend, reverse=True, cu_seqlens=cu_seqlens), expected)


@pytest.mark.parametrize(
    ("op", "backend"), [form for form in BACKENDS if takes(form[0], "reverse") and takes(form[0], "mask")]
)
def test_padding_stays_where_it_is_in_reverse(op, backend):
    inputs = make_inputs(op, tokens=19)
    mask = torch.rand((2, 19), generator=torch.Generator().manual_seed(0)) < 0.7
    expected, state = inputs.run_reversed(backend="reference", mask=mask.flip(1))
    actual, last = inputs.run(backend=backend, mask=mask, reverse=True)
    assert_same(results(actual[mask], last), results(expected[mask], state))


@pytest.mark.parametrize(("op", "backend"), [form for form in BACKENDS if takes(form[0], "reverse")])
@cases("tokens", [1, 19])
@pytest.mark.slow
def test_half_of_the_rows_is_read_from_the_end(op, backend, tokens):
    for variant in list_variants(op)[:4]:
        inputs = make_inputs(op, variant, batch=4, tokens=tokens)
        for own in (inputs, inputs.with_own_parameters()) if inputs.parameters else (inputs,):
            expected = gradients(own, run=Inputs.run_both_ways, backend="reference")
            assert_same(gradients(own, backend=backend, reverse="second_half"), expected)


@pytest.mark.parametrize("op", [op for op in list_ops() if takes(op, "scale")])
def test_a_scale_that_is_a_tensor_is_refused(op):
    """Operations have no gradient for it; a parameter that scales would never learn."""
    with pytest.raises(ValueError, match="scale is a tensor"):
        make_inputs(op, tokens=3).run(scale=torch.nn.Parameter(torch.ones(())))


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_absent_state_is_zero_or_the_stated_one(op, backend):
    inputs = make_inputs(op)
    if inputs.needs_state:
        with pytest.raises(ValueError, match="initial_state"):
            inputs.run(backend=backend, initial_state=None)
        return
    first = each(torch.zeros_like, inputs.initial_state) if inputs.absent_state is None else inputs.absent_state
    expected = results(*inputs.run(backend=backend, initial_state=first))
    for name, value in results(*inputs.run(backend=backend, initial_state=None)).items():
        assert torch.equal(value, expected[name]), name
    assert inputs.run(backend=backend, output_final_state=False)[1] is None


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_rate_of_minus_infinity_forgets_in_all_tokens_with_a_step(backend):
    """Also where tokens without a step fill up a chunk, or a packed sequence that is shorter than others."""
    plain = make_inputs("selective_scan", tokens=11, segments=4)
    delta = plain.sequences["delta"].index_fill(1, torch.tensor([10]), 0)
    inputs = plain.replace({"A": torch.full_like(plain.parameters["A"], -torch.inf), "delta": delta})
    options = {"cu_seqlens": torch.tensor([0, 3, 3, 7, 11]), "backend": backend}
    writes = ((delta * inputs.sequences["x"]).unsqueeze(-1) * inputs.sequences["B"].unsqueeze(-2))[0]
    found = gradients(inputs, **options)
    expected = torch.stack((writes[2], plain.initial_state[1], writes[6], writes[9]))
    assert_equal_up_to_rounding(found["final_state"], expected, "final_state")
    found["gradient of delta"] = found["gradient of delta"][:, :10]  # the last one is infinite: 0 is where it forgets
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("op", list_ops())
def test_strides_do_not_matter(op):
    def strided(x):
        return torch.stack((x, x), -1).transpose(0, -2)[..., 0].transpose(0, -1)

    inputs = make_inputs(op, list_variants(op)[-1])
    assert not any(x.is_contiguous() for x in inputs.map(strided).sequences.values())
    assert_same(gradients(inputs.map(strided)), gradients(inputs))


@pytest.mark.parametrize("op", list_ops())
@cases("variant", list_variants)
def test_inputs_are_left_as_they_are(op, variant):
    inputs = make_inputs(op, variant, batch=1, tokens=16).map(lambda x: x.requires_grad_())
    before = inputs.map(lambda x: x.detach().clone())
    output, state = inputs.run()
    sum(x.sum() for x in results(output, state).values() if x.is_floating_point()).backward()
    for name, tensor in inputs.tensors.items():
        assert torch.equal(tensor, before.tensors[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("op", list_ops())
@cases("variant", list_variants)
def test_float32_is_as_accurate_as_the_recurrence(op, variant):
    inputs = make_inputs(op, variant, tokens=80, dtype=torch.float32)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    peer, actual = gradients(inputs, backend="reference"), gradients(inputs)
    for name, value in actual.items():
        assert value.dtype in (torch.float32, torch.int64)
        assert_accurate(value, peer[name], exact[name], name)


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
@cases("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(op, backend, dtype):
    inputs = make_inputs(op, tokens=20, dtype=torch.float32).map(lambda x: x.to(dtype))
    wide = results(*inputs.map(torch.Tensor.float).run(backend=backend))
    actual = results(*inputs.run(backend=backend))
    assert actual["output"].dtype == dtype
    assert torch.equal(actual["output"], wide["output"].to(dtype))
    for name in actual.keys() - {"output"}:
        assert actual[name].dtype in (torch.float32, torch.int64)
        assert torch.equal(actual[name], wide[name]), name
    assert all(value.isfinite().all() for value in gradients(inputs, backend=backend).values())


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_autocast_does_not_reach_inside(op, backend):
    inputs = make_inputs(op, tokens=20, dtype=torch.float32)
    expected = gradients(inputs, backend=backend)

    def run(inputs, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return inputs.run(**options)

    actual = gradients(inputs, run, backend=backend)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("op", list_ops())
def test_backward_keeps_less_than_the_states_of_all_tokens(op):
    sizes = {"K": 32, "V": 32, "M": 32}
    inputs = make_inputs(op, tokens=256, dtype=torch.float32, sizes=sizes).map(lambda x: x.requires_grad_())
    kept: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        inputs.run(**({"chunk_size": 16} if takes_chunk_size(op) else {}))
    own = sum(x.numel() for x in inputs.tensors.values())
    state = sum(x.numel() for name, x in inputs.tensors.items() if name.startswith("initial_state"))
    assert sum(x.numel() for x in kept.values()) - own < inputs.tokens * state


# Layers of these are compiled in test_directions.py and test_contract.py of mixers; slot attention is two linear ones.
COMPILED_IN_LAYERS = ("delta_rule", "longhorn_scan", "orthogonal_recurrence", "recursive_least_squares")
COMPILED_IN_LAYERS += ("slot_attention", "variational_linear_attention")


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in list_ops() if op not in COMPILED_IN_LAYERS])
def test_compiles_to_one_graph(op):
    """One graph serves any number of tokens: torch makes it symbolic when it sees a second number.

    The backend runs the graph as it is. What AOTAutograd makes of it is tested for mixers that cover all operations.
    """
    torch._dynamo.reset()
    compiled = torch.compile(lambda inputs: inputs.run(), fullgraph=True, backend="eager")

    def run(inputs):
        for x in inputs.sequences.values():
            torch._dynamo.maybe_mark_dynamic(x, 1)
        return compiled(inputs)

    inputs = make_inputs(op, tokens=3)  # the graph of a chunk has parts for each of its halves
    assert_same(gradients(inputs, run=run), gradients(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "variant"), CASES)
@pytest.mark.parametrize("tokens", [1, 37, 150])
def test_a_gpu_gives_the_same(op, variant, tokens):
    inputs = make_inputs(op, variant, tokens=tokens, dtype=torch.float32)
    peer = gradients(inputs, backend="reference")
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    for backend in list_forms(op, "cuda", torch.float32):
        actual = gradients(inputs.to("cuda"), backend=backend)
        for name, value in exact.items():
            # The last term is the error of the hardware's exp, sigmoid and division, which matters in float32 only.
            allowed = 8 * error(peer[name], value) + 64 * torch.finfo(torch.float32).eps
            assert error(actual[name].cpu(), value) <= allowed, f"{backend}: {name}"
