"""The Triton kernels: interpreted on the CPU at tiny shapes, and at real ones on a GPU."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from kernel_inputs import (
    Inputs,
    assert_accurate,
    error,
    gradients,
    list_variants,
    make_inputs,
    results,
    takes,
)

from longseq.kernels import delta_rule, linear_attention, list_ops, short_convolution
from longseq.kernels.accuracy import Bar
from longseq.kernels.dispatch import backends
from longseq.kernels.packing import Packing

TRITON_OPS = [op for op in list_ops() if any(backend.name == "triton" for backend in backends(op))]
CASES = [(op, variant) for op in TRITON_OPS for variant in list_variants(op)]


def assert_as_accurate_as_torch(inputs, exact, device="cpu", **options):
    """Compare outputs, final state and gradients with float64; the error of the torch form in the same precision sets
    the limit.
    """
    plain = gradients(inputs, backend="torch", **options)
    actual = gradients(inputs.map(lambda x: x.to(device)), backend="triton", **options)
    assert actual.keys() == exact.keys()
    for name, value in exact.items():
        assert_accurate(actual[name].cpu(), plain[name], value, name)


@pytest.mark.parametrize(("op", "variant"), CASES)
def test_kernel_equals_the_recurrence(interpreted, op, variant):
    # The first variant of an operation reads two rows and two heads, and then a single token.
    one = {"batch": 1, "sizes": {"H": few_heads(variant)}}
    shapes = [{"tokens": 5}, {"tokens": 1, **one}] if variant == list_variants(op)[0] else [{"tokens": 7, **one}]
    for shape in shapes:
        exact = gradients(make_inputs(op, variant, **shape), backend="reference")
        assert_as_accurate_as_torch(make_inputs(op, variant, dtype=torch.float32, **shape), exact)


# Others are read over several chunks, tiles or parts of time below, and from their ends.
@pytest.mark.slow
@pytest.mark.parametrize("op", ["longhorn_scan", "orthogonal_recurrence"])
def test_packed_segments_are_separate(interpreted, op):
    bounds = torch.tensor([0, 2, 2, 5])
    inputs = make_inputs(op, segments=3, tokens=5, sizes={"H": 1})
    exact = gradients(inputs, backend="reference", cu_seqlens=bounds)
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), exact, cu_seqlens=Packing(bounds))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["delta_rule", "longhorn_scan", "orthogonal_recurrence", "recursive_least_squares"])
def test_gradients_of_a_part_that_runs_again(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], batch=1, tokens=2, dtype=torch.float32, sizes={"H": 1})
    expected = gradients(inputs, backend="triton")
    actual = gradients(inputs, run=Inputs.run_checkpointed, backend="triton")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if takes(op, "reverse") and op != "orthogonal_recurrence"])
def test_packed_segments_in_reverse(interpreted, op):
    # The last segment is longer than a chunk in float32, or than a checkpoint of the scans.
    tokens = 37 if op in ("delta_rule", "linear_attention") else 20
    options = {"cu_seqlens": torch.tensor([0, 2, 2, tokens])}
    inputs = make_inputs(op, segments=3, tokens=tokens, sizes={"H": 1})
    exact = gradients(inputs, run=Inputs.run_reversed, backend="reference", **options)
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), exact, reverse=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "variant", "tokens"),
    [
        ("delta_rule", "gated_write_key", 35),  # more than a chunk of float32
        ("linear_attention", "channel_gated", 35),
        ("longhorn_scan", "plain", 18),  # more than a checkpoint's
        ("short_convolution", "silu", 35),
        ("slot_attention", "write", 3),
        ("recursive_least_squares", "plain", 18),  # more than a chunk of float32
        ("variational_linear_attention", "plain", 18),
    ],
)
def test_reading_half_of_the_rows_in_reverse(interpreted, op, variant, tokens):
    """Other tests have parameters of each direction."""
    inputs = make_inputs(op, variant, tokens=tokens, sizes={"H": 1})
    exact = gradients(inputs, run=Inputs.run_both_ways, backend="reference")
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), exact, reverse="second_half")


def _differentiate_gated(q, k, v, d_output, *, scale=0.125, backend, **gates):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates.values())]
    output, _ = linear_attention(
        *leaves[:3], **dict(zip(gates, leaves[3:], strict=True)), scale=scale, output_final_state=False, backend=backend
    )
    return dict(zip("oqkvg", (output, *torch.autograd.grad(output, leaves, d_output)), strict=True))


@pytest.mark.parametrize(("silent", "scale"), [("first chunk", 0.125), ("last chunk", 0.125), (None, -0.125)])
def test_linear_attention_gated_by_key_through_a_chunk_of_zeros(interpreted, silent, scale):
    q, k, v, d_output = torch.randn(4, 1, 70 if silent is None else 130, 1, 64, dtype=torch.float16)
    g = -0.1 * torch.rand_like(q, dtype=torch.float32)
    if silent == "first chunk":
        k[:, :70], v[:, :70] = 0, 0
    if silent == "last chunk":  # as for a padded batch
        k[:, 60:], g[:, 60:], d_output[:, 60:] = 0, 0, 0
    exact = _differentiate_gated(*(x.double() for x in (q, k, v, d_output)), g=g.double(), scale=scale, backend="torch")
    for name, value in _differentiate_gated(q, k, v, d_output, g=g, scale=scale, backend="triton").items():
        assert error(value, exact[name]) <= 3e-3, name


DELTA_FORMS = ("trained", "read", "walked")


@contextmanager
def delta_form(form):
    """The delta rule's kernels that keep what gradients need, those that do not, or the one that walks along time."""
    from longseq.kernels.delta_rule import triton_delta

    if form == "trained":
        yield
        return
    limits = {"FILLING": 1, "PACKED_TOKENS": 1000} if form == "walked" else {"FILLING": 1000, "SHORT_TOKENS": 0}
    with torch.no_grad(), mock.patch.multiple(triton_delta, **limits):
        yield


def delta_results(inputs, form, **options):
    with delta_form(form):
        if form == "trained":
            return gradients(inputs, backend="triton", **options)
        output, final = inputs.run(backend="triton", **options)
    return {"output": output, "final_state": final}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype"), [("trained", torch.float32), ("read", torch.float16), ("walked", torch.float16)]
)
@pytest.mark.parametrize(
    "gates",
    [
        (-1e-9, -0.3, -5000.0, -1e-3, -2.0, -0.7),
        (-math.inf, -0.1, -1e30, -90.0, -0.01),
        (-700.0, -0.004, -0.01, -0.02),  # after resets, what differences of sums would lose
        (2.5, -2.6),  # decays of pairs of tokens are up to e^2.5, their bound from positive gates e^40
    ],
    ids=["mixed", "infinite", "after_resets", "rising"],
)
def test_delta_rule_with_gates_of_any_size(interpreted, gates, form, dtype):
    inputs = make_inputs("delta_rule", "gated", batch=1, tokens=70, dtype=torch.float32, sizes={"H": 1})
    g = torch.tensor(gates).repeat(70)[:70].reshape(1, 70, 1)
    inputs = inputs.replace({"g": g}).map(lambda x: x.to(dtype))
    exact, plain = (gradients(x, backend="torch") for x in (inputs.map(torch.Tensor.double), inputs))
    for name, value in delta_results(inputs, form).items():
        limit = max(error(plain[name], exact[name]), 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
        assert error(value, exact[name]) <= 3 * limit, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "reverse", "dtype"),
    [("walked", False, torch.float16), ("read", True, torch.float16), ("trained", True, torch.float16)],
)
def test_delta_rule_over_several_chunks(interpreted, form, dtype, reverse):
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has two chunks
    inputs = make_inputs("delta_rule", "gated_write_key", tokens=70, segments=4, dtype=dtype, sizes={"H": 1})
    run = Inputs.run_reversed if reverse else Inputs.run
    exact = gradients(inputs.map(torch.Tensor.double), run=run, backend="reference", cu_seqlens=bounds)
    for name, value in delta_results(inputs, form, cu_seqlens=bounds, reverse=reverse).items():
        # float16 products for every dtype, then rounding; the interpreter truncates bfloat16.
        assert error(value, exact[name]) <= 2e-3 + torch.finfo(dtype).eps, name


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 81])
@pytest.mark.parametrize("form", DELTA_FORMS)
def test_delta_rule_ends_within_a_chunk(interpreted, form, tokens):
    """Up to 16 last tokens have their own code, and nothing past the last token is read from memory."""
    assert torch.empty(1).isnan(), "new memory is NaN"
    sizes = {"H": 1}
    inputs = make_inputs("delta_rule", "gated_write_key", batch=1, tokens=tokens, dtype=torch.float16, sizes=sizes)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    for name, value in delta_results(inputs, form).items():
        assert error(value, exact[name]) <= 4e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("form", DELTA_FORMS)
def test_delta_rule_inverts_for_repeated_keys_in_half_precision(interpreted, form):
    inputs = make_inputs("delta_rule", "repeated_keys", tokens=70, batch=1, dtype=torch.float16, sizes={"H": 1})
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    for name, value in delta_results(inputs, form).items():
        # With strengths near 2, the first of 64 errors persists to the last token; a wrong inverse is off by more than
        # 1.
        assert error(value, exact[name]) <= 2e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("form", ["trained", "walked"])
def test_delta_rule_keeps_the_range_of_every_sequence_and_head(interpreted, form):
    of_values = 2.0 ** torch.tensor([[90, 0], [-90, 45]])  # by sequence and head
    of_gradients = 2.0 ** torch.tensor([[-60, 30], [0, 60]])
    shape = (2, 70, 2, 16)
    q, k, v, d_output = (torch.randn(shape).bfloat16() for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta, state = torch.rand(shape[:3]).bfloat16(), torch.randn(2, 2, 16, 16)

    def scale(x, factors):
        return x * (factors[:, :, None, None] if x is state else factors[:, None, :, None]).to(x.dtype)

    def run(of_values, of_gradients):
        leaves = [x.detach() for x in (q, k, scale(v, of_values), beta, scale(state, of_values))]
        if form == "trained":
            leaves = [x.requires_grad_() for x in leaves]
        with delta_form(form):
            o, final = delta_rule(*leaves[:4], initial_state=leaves[4], output_final_state=True, backend="triton")
        gradients = torch.autograd.grad(o, leaves, scale(d_output, of_gradients)) if form == "trained" else ()
        return [final, o, *gradients]

    both = of_values * of_gradients
    factors = (of_values, of_values, both, both, of_gradients, both, of_gradients)
    plain, scaled = run(torch.ones(2, 2), torch.ones(2, 2)), run(of_values, of_gradients)
    for x, y, factor in zip(plain, scaled, factors[: len(plain)], strict=True):
        by_time = x.shape[1] == shape[1]
        factor = factor[:, None, :] if by_time else factor[:, :, None]
        assert torch.equal(y, x * (factor if x.ndim == 3 else factor[..., None]).to(x.dtype))


# The relative error of truncation to bfloat16, as in the interpreter. Rounding errs by half as much.
CUT_OFF = torch.finfo(torch.bfloat16).eps / 4


def delta_errors(form, factors, part=slice(None), outlier=None):
    """Relative errors of a delta rule in bfloat16, of its output and gradients in a part of time: ours and torch's.

    `factors` multiply the inputs, at all tokens or only at the token `outlier`.
    """
    inputs = make_inputs("delta_rule", "plain", batch=1, tokens=70, dtype=torch.float32, sizes={"H": 1})
    scaled = {name: x.clone() for name, x in inputs.arguments.items() if name in factors}
    for name, x in scaled.items():
        x[:, slice(None) if outlier is None else outlier] *= factors[name]
    inputs = inputs.replace(scaled).map(torch.Tensor.bfloat16)
    exact = gradients(inputs.map(torch.Tensor.double), backend="torch")
    forms = delta_results(inputs, form), gradients(inputs, backend="torch")
    names = ["output", *(f"gradient of {name}" for name in "qkv" if form == "trained")]
    return {
        name: [((x[name] - exact[name])[:, part].norm() / exact[name][:, part].norm()).item() for x in forms]
        for name in names
    }


@pytest.mark.parametrize("form", ["trained", "walked"])
@pytest.mark.parametrize(
    "factors",
    [{"q": 1e-6}, {"k": 1e6, "beta": 1e-12, "initial_state": 1e-6}, {"v": 1e20, "initial_state": 1e20}],
    ids=str,
)
def test_delta_rule_takes_inputs_of_any_size(interpreted, form, factors):
    for name, (ours, plain) in delta_errors(form, factors).items():
        assert ours <= 3 * max(plain, CUT_OFF), name


@pytest.mark.parametrize("form", ["trained", "walked"])
@pytest.mark.parametrize("names", ["k", "qkv"])
def test_delta_rule_keeps_tokens_beside_a_large_one(interpreted, form, names):
    factors = dict.fromkeys(names, 1e4)
    for name, (ours, plain) in delta_errors(form, factors, slice(20), outlier=20).items():
        assert ours <= 3 * max(plain, CUT_OFF), name


# Operations that read a chunk of tokens at once, and the input of which one token is large.
LARGE_TOKENS = [
    ("linear_attention", "plain", "v"),
    ("linear_attention", "head_gated", "v"),
    ("linear_attention", "grouped", "v"),
    ("linear_attention", "channel_gated", "k"),
    ("linear_attention", "extreme_channel_decay", "k"),
    ("linear_attention", "value_gated", "v"),
    ("linear_attention", "extreme_value_decay", "v"),
    ("delta_rule", "gated", "v"),
    ("delta_rule", "gated_write_key", "v"),
    ("delta_rule", "extreme_decay", "q"),
    ("delta_rule", "extreme_decay", "beta"),
    ("slot_attention", "plain", "v"),
    ("orthogonal_recurrence", "plain", "v"),
    ("longhorn_scan", "plain", "x"),
    ("selective_scan", "plain", "x"),
    ("recursive_least_squares", "no_refresh", "x"),
    ("recursive_least_squares", "extreme_directions", "x"),
    ("variational_linear_attention", "plain", "k"),
    ("variational_linear_attention", "no_refresh", "v"),
]


def assert_accurate_before_a_large_token(op, variant, name, **options):
    tokens, place = 40, 20
    found = find_errors_beside_a_large_token(op, variant, name, tokens, place, slice(place), torch.bfloat16, **options)
    for key, (ours, plain) in found.items():
        assert ours <= 3 * max(plain, CUT_OFF), key


def find_errors_beside_a_large_token(op, variant, name, tokens, place, part, dtype, **options):
    """Relative errors of the output and of the gradients of inputs, in a part of time: ours and torch's."""
    inputs = make_inputs(op, variant, batch=1, tokens=tokens, dtype=torch.float32, **options)
    x = inputs.arguments[name].clone()
    x[:, place] *= 1e4
    inputs = inputs.replace({name: x}).map(lambda x: x.to(dtype))
    exact = gradients(inputs.map(torch.Tensor.double), backend="torch")
    forms = [gradients(inputs, backend=backend) for backend in ("triton", "torch")]
    by_time = [key for key, value in exact.items() if value.ndim > 1 and value.shape[1] == tokens]
    assert {"output", *(f"gradient of {name}" for name in inputs.sequences)} <= set(by_time)
    return {
        key: [((form[key] - exact[key])[:, part].norm() / exact[key][:, part].norm()).item() for form in forms]
        for key in by_time
    }


# Operations with gates, and types in which what is left of a large query would show in the gradients of gates after it.
LARGE_QUERIES = [
    ("slot_attention", "relu_squared", torch.bfloat16),
    ("slot_attention", "relu_squared", torch.float32),
    ("linear_attention", "head_gated", torch.float32),
    ("linear_attention", "grouped", torch.float32),
    ("linear_attention", "channel_gated", torch.float32),
    ("linear_attention", "extreme_channel_decay", torch.float32),
    ("linear_attention", "value_gated", torch.float32),
]


def assert_gates_accurate_after_a_large_query(op, variant, dtype, **options):
    tokens, place = 40, 20
    part = slice(place + 1, None)
    found = find_errors_beside_a_large_token(op, variant, "q", tokens, place, part, dtype, seed=2, **options)
    gates = [key for key in found if key.startswith("gradient of g")]
    assert gates
    for key in gates:
        ours, plain = found[key]
        assert ours <= 3 * max(plain, CUT_OFF if dtype == torch.bfloat16 else 1e-6), key


# Operations with gates, the variants of their inputs, and the names of the gates.
GATED = [
    ("delta_rule", "gated", "g"),
    ("linear_attention", "head_gated", "g"),
    ("linear_attention", "channel_gated", "g"),
    ("linear_attention", "value_gated", "g_value"),
    ("delta_rule", "channel", "g"),
    ("delta_rule", "channel_added_before", "g"),
    ("linear_attention", "grouped", "g"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "variant", "name", "gate"),
    [(*case, -18.0) for case in (GATED[0], GATED[3])],  # Gated DeltaNet's reach -16 with the usual A
)
def test_gradients_of_strong_gates_are_accurate(interpreted, op, variant, name, gate):
    inputs = make_inputs(op, variant, batch=1, tokens=70, dtype=torch.float32, sizes={"H": 1})
    assert_gates_accurate(inputs.replace({name: torch.full_like(inputs.arguments[name], gate)}), name, torch.float32)


def with_large_end(inputs, gates, large, reset, place):
    """Inputs whose tokens from `place` on are 1e4 times larger; if `reset`, a gate forgets what was before them."""
    changed = {key: inputs.arguments[key].clone() for key in (gates, large)}
    changed[large][:, place:] *= 1e4
    if reset:
        changed[gates][:, place] = -30
    return inputs.replace(changed)


def assert_gates_accurate(inputs, name, dtype, part=slice(None)):
    """In a part of time, the gradient of the gates errs by at most three times the torch form's error."""
    inputs = inputs.map(lambda x: x.to(dtype))
    forms = [(inputs.map(torch.Tensor.double), "torch"), (inputs, "torch"), (inputs, "triton")]
    exact, plain, ours = (
        gradients(x, backend=backend)[f"gradient of {name}"][:, part].double() for x, backend in forms
    )
    assert exact.abs().max() > 0
    # The GPU's exp is 1e-6 off, and more for large arguments. Tiles round each factor to 11 bits, as float16 does.
    limit = {torch.bfloat16: CUT_OFF, torch.float16: 2**-11}.get(dtype, 2.5e-6 if ours.is_cuda else 1e-6)
    assert (ours - exact).norm() <= 3 * max((plain - exact).norm() / exact.norm(), limit) * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("op", ["delta_rule", "linear_attention", "selective_scan"])  # a GPU tries all
def test_nan_reaches_what_depends_on_it(interpreted, op):
    inputs = make_inputs(op, batch=1, tokens=3, dtype=torch.float16, sizes={"H": 1})
    assert_nan_reaches_what_depends_on_it(inputs, place=1)


def assert_nan_reaches_what_depends_on_it(inputs, place):
    """Each number that is NaN in the recurrence, where one number of a token is, must be NaN in both other forms."""
    for name, x in inputs.sequences.items():
        spoiled = x.clone()
        spoiled[0, place].view(-1)[0] = torch.nan
        spoiled = inputs.replace({name: spoiled})
        expected = gradients(spoiled.map(torch.Tensor.float), backend="reference")
        assert expected["output"].isnan().any(), name
        for backend in ("torch", "triton"):
            actual = gradients(spoiled, backend=backend)
            for key, value in expected.items():
                assert actual[key][value.isnan()].isnan().all(), f"{backend}: {name} -> {key}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("k", 30.0), ("v", math.inf), ("k", math.nan)])
def test_delta_rule_without_gradients_leaves_chunks_before_a_steep_one_alone(interpreted, name, factor):
    # A chunk of 32 tokens that is not mild is read with another inverse, and the whole sequence may be read again.
    sizes = {"H": 1}
    inputs = make_inputs("delta_rule", "gated_write_key", batch=1, tokens=70, dtype=torch.bfloat16, sizes=sizes)
    spoiled = {name: inputs.arguments[name].clone()}
    spoiled[name][:, 40:44] *= factor
    spoiled = inputs.replace(spoiled)
    expected, actual = (delta_results(x, "walked") for x in (inputs, spoiled))
    assert torch.equal(actual["output"][:, :32], expected["output"][:, :32])
    if math.isfinite(factor):
        exact, plain = (gradients(x, backend="torch")["output"] for x in (spoiled.map(torch.Tensor.double), spoiled))
        assert error(actual["output"], exact) <= 3 * max(error(plain, exact), CUT_OFF)
    else:
        assert not actual["output"][:, 40:44].isfinite().all()


@pytest.fixture
def delta_segments(monkeypatch):
    """Segments of time with two chunks; records for each call the number of segments of its programs."""
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "_find_span", lambda *sizes: 2)
    counts = []
    plan = triton_delta._plan
    monkeypatch.setattr(triton_delta, "_plan", lambda *call: counts.append(plan(*call).walks) or plan(*call))
    return counts


def lasting(inputs):
    """A delta rule that replaces so little in each step that the first token still affects the last segment."""
    return inputs.replace({"beta": 0.02 * inputs.sequences["beta"]})


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "reverse"), [("gated_write_key", True)])
def test_delta_rule_in_segments_of_time(interpreted, delta_segments, monkeypatch, variant, reverse):
    from longseq.kernels.delta_rule import triton_delta

    # Bytes of weighed queries and keys: more are weighed again.
    monkeypatch.setattr(triton_delta, "KEPT_ROWS", 1 if reverse else 1 << 20)
    bounds = torch.tensor([0, 3, 3, 262])  # sequences of one, no and three segments
    inputs = lasting(make_inputs("delta_rule", variant, tokens=262, segments=3, dtype=torch.float16, sizes={"H": 1}))
    if "g" in inputs.sequences:
        inputs = inputs.replace({"g": 0.01 * inputs.sequences["g"]})
    run = Inputs.run_reversed if reverse else Inputs.run
    exact = gradients(inputs.map(torch.Tensor.double), run=run, backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds, reverse=reverse)
    assert set(delta_segments) == {262 // 128 + 4}
    for name, value in exact.items():
        assert error(actual[name], value) <= 3e-3, name


@pytest.mark.slow
def test_delta_rule_in_segments_of_time_in_float32(interpreted, delta_segments):
    exact, inputs = (
        lasting(make_inputs("delta_rule", "plain", batch=1, tokens=140, dtype=dtype, sizes={"H": 1, "K": 20}))
        for dtype in (torch.float64, torch.float32)
    )
    assert_as_accurate_as_torch(inputs, gradients(exact, backend="reference"))
    assert set(delta_segments) == {3}


@pytest.mark.slow
def test_delta_rule_in_segments_of_time_reads_half_of_the_rows_in_reverse(interpreted, delta_segments):
    inputs = lasting(make_inputs("delta_rule", "gated", tokens=150, dtype=torch.float16, sizes={"H": 1}))
    inputs = inputs.replace({"g": 0.01 * inputs.sequences["g"]})
    exact = gradients(inputs.map(torch.Tensor.double), run=Inputs.run_both_ways, backend="torch")
    for name, value in gradients(inputs, backend="triton", reverse="second_half").items():
        assert error(value, exact[name]) <= 3e-3, name
    assert set(delta_segments) == {2 * 2}  # of two chunks, the last one of each row of one


@pytest.mark.slow
@pytest.mark.parametrize("differentiable", [False, True])
def test_what_is_written_while_a_large_state_fades_keeps_its_bits(interpreted, monkeypatch, differentiable):
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "SHORT_TOKENS", 0)  # with the kernels of long sequences
    monkeypatch.setattr(triton_delta, "FILLING", math.inf)
    inputs = make_inputs(
        "delta_rule", "gated", batch=1, tokens=128, dtype=torch.float16, sizes={"H": 1, "K": 40, "V": 24}
    )
    gate = torch.where(torch.arange(128) < 64, -1.2, -0.01).view(1, 128, 1)
    state = 1e8 * torch.randn(1, 1, 40, 24, generator=torch.Generator().manual_seed(0))

    def read_second_chunk(dtype, backend):
        sequences = {name: x.to(dtype) for name, x in inputs.sequences.items()} | {"g": gate.to(state.dtype)}
        if dtype == torch.float64:
            sequences["g"] = gate.double()
        sequences["v"].requires_grad_(differentiable)
        o, _ = delta_rule(**sequences, initial_state=state.to(sequences["g"].dtype), backend=backend)
        return o.detach()[:, 64:].double()

    ours, exact = read_second_chunk(torch.float16, "triton"), read_second_chunk(torch.float64, "reference")
    assert (ours - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("op", ["delta_rule", "linear_attention", "slot_attention", "variational_linear_attention"])
def test_half_precision_values_beside_float32_keys(interpreted, op):
    # 40 tokens are more than a chunk of float32.
    inputs = make_inputs(op, batch=1, tokens=40, dtype=torch.float32, sizes={"H": 1})
    inputs = inputs.replace({"v": inputs.arguments["v"].half()})
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    actual = gradients(inputs, backend="triton")
    assert actual["output"].dtype == actual["gradient of v"].dtype == torch.float16
    assert actual["gradient of q"].dtype == actual["gradient of k"].dtype == torch.float32
    for name, value in exact.items():
        assert error(actual[name], value) <= 3e-3, name


# Gates per channel up to 3 need pairs of blocks of 2 tokens, those up to 30 of 1.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "strength"),
    [
        ("plain", 0.0),
        ("extreme_head_decay", 1.0),
        ("grouped", 30.0),
        ("grouped_plain", 0.0),
        ("channel_gated", 30.0),
        ("value_gated", 3.0),
    ],
)
def test_linear_attention_over_several_chunks(interpreted, variant, strength):
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has two chunks
    sizes = {"H": 2, "G": 1} if "grouped" in variant else {"H": 1}
    inputs = make_inputs("linear_attention", variant, tokens=70, segments=4, dtype=torch.float16, sizes=sizes)
    gates = {name: strength * x for name, x in inputs.sequences.items() if name.startswith("g")}
    inputs = inputs.replace(gates)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds)
    for name, value in exact.items():
        assert error(actual[name], value) <= 2e-3, name


@pytest.mark.parametrize(
    ("variant", "groups"), [("grouped", 2), ("grouped_plain", 1), ("channel_gated", 2), ("value_gated", 1)]
)
def test_linear_attention_of_groups_is_that_of_repeated_keys(interpreted, variant, groups):
    inputs = make_inputs("linear_attention", variant, tokens=5, sizes={"H": 4})
    keys = {name: inputs.sequences[name][:, :, :groups] for name in "qk"}
    inputs = inputs.replace(keys)
    repeated = inputs.replace({name: x.repeat_interleave(4 // groups, 2) for name, x in keys.items()})
    exact = gradients(repeated, backend="reference")
    exact |= {name: exact[name].unflatten(2, (groups, -1)).sum(3) for name in ("gradient of q", "gradient of k")}
    for backend in ("torch", "reference"):
        for name, x in gradients(inputs, backend=backend).items():
            torch.testing.assert_close(x, exact[name], msg=name)
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), exact)


@pytest.fixture
def linear_segments(monkeypatch):
    """Segments of time with two chunks for linear attention; records the walks of each pass."""
    from longseq.kernels.linear_attention import triton_linear

    monkeypatch.setattr(triton_linear, "find_walk_span", lambda *sizes: 2)
    walks = []

    class Watched(triton_linear._Call):
        def __init__(self, *call):
            super().__init__(*call)
            walks.append(self.walks)

    monkeypatch.setattr(triton_linear, "_Call", Watched)
    return walks


GATES = {"plain": {}, "head_gated": {"g": 0.02}, "channel_gated": {"g": 0.02}, "value_gated": {"g_value": 0.02}}
GATES |= {"grouped": {"g": 0.02}, "grouped_plain": {}}


def few_heads(variant):
    return 2 if "grouped" in variant else 1


def weaken_gates(inputs, variant):
    """Linear attention with gates so weak that the first token still affects the last segment."""
    return inputs.replace({name: factor * inputs.sequences[name] for name, factor in GATES[variant].items()})


@pytest.mark.slow
def test_linear_attention_in_segments_of_time(interpreted, linear_segments):  # the GPU's test has all variants
    bounds = torch.tensor([0, 3, 3, 262])  # sequences of one, no and three segments
    shape = {"tokens": 262, "segments": 3, "sizes": {"H": 1, "K": 70, "V": 40}}
    gated = make_inputs("linear_attention", "channel_gated", dtype=torch.bfloat16, **shape)
    inputs = weaken_gates(gated, "channel_gated")
    options = {"backend": "triton", "cu_seqlens": bounds, "reverse": True}
    exact = gradients(inputs.map(torch.Tensor.double), run=Inputs.run_reversed, backend="torch", cu_seqlens=bounds)
    actual = gradients(inputs, **options)
    for name, value in exact.items():
        assert error(actual[name], value) <= 8e-3, name
    assert torch.equal(inputs.run(**options)[0], actual["output"])  # keeps no states for gradients
    assert linear_segments == [262 // 128 + 4] * 3


@pytest.mark.slow
def test_linear_attention_in_segments_of_time_in_float32(interpreted, linear_segments):
    shape = {"tokens": 140, "sizes": {"H": 1, "K": 40}}
    exact, inputs = (
        weaken_gates(make_inputs("linear_attention", "value_gated", dtype=dtype, **shape), "value_gated")
        for dtype in (torch.float64, torch.float32)
    )
    expected = gradients(exact, run=Inputs.run_both_ways, backend="reference")
    assert_as_accurate_as_torch(inputs, expected, reverse="second_half")
    assert linear_segments == [2 * 3] * 2


@pytest.mark.parametrize("variant", ["extreme_head_decay", "extreme_value_decay"])
def test_linear_attention_over_several_float32_chunks(interpreted, variant):
    inputs = make_inputs("linear_attention", variant, batch=1, tokens=70, sizes={"H": 1})
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), gradients(inputs, backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "factor"), [("channel_gated", 2.0**100), ("value_gated", 2.0**-100)])
def test_linear_attention_in_half_precision_takes_values_and_gradients_of_any_size(interpreted, variant, factor):
    inputs = make_inputs("linear_attention", variant, batch=1, tokens=20, dtype=torch.bfloat16, sizes={"H": 1})
    large = inputs.replace({name: inputs.arguments[name] * factor for name in ("v", "initial_state")})
    for ours, theirs in zip(large.run(backend="triton"), inputs.run(backend="triton"), strict=True):
        torch.testing.assert_close(ours.double() / factor, theirs.double())

    def gradients_of(weight):
        leaves = inputs.map(lambda x: x.detach().requires_grad_())
        o, _ = leaves.run(backend="triton")
        grads = torch.autograd.grad(o, list(leaves.tensors.values()), torch.full_like(o, weight))
        return [grad.double() / weight for grad in grads]

    for ours, theirs in zip(gradients_of(factor), gradients_of(1.0), strict=True):
        torch.testing.assert_close(ours, theirs)


LEAST_SQUARES_OPS = ["recursive_least_squares", "variational_linear_attention"]


@pytest.mark.slow
def test_packed_half_precision_over_several_chunks(interpreted):
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has two chunks or more
    inputs = make_inputs("recursive_least_squares", tokens=70, segments=4, dtype=torch.float16, sizes={"H": 1})
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds)
    for name, value in exact.items():
        assert error(actual[name], value) <= 3e-3, name


@pytest.fixture
def refused(monkeypatch):
    """Segments of time for few tokens; records for each call whether one program had to compute all of them."""
    from longseq.kernels.recursive_least_squares import triton_least_squares as kernels

    monkeypatch.setattr(kernels, "FEWEST_SEGMENTS", 2)
    calls = []
    solve = kernels.solve

    class Watched:
        __name__, arg_names = "solve", solve.arg_names

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                solve[grid](*args, **kwargs)
                calls.append(bool(args[2][:, :, 1:].any()))

            return launch

    monkeypatch.setattr(kernels, "solve", Watched())
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "reverse"), [("extreme_directions", False), ("plain", "second_half")])
def test_least_squares_in_segments_of_time(interpreted, refused, variant, reverse):
    shape = {"batch": 2 if reverse else 1, "tokens": 150, "sizes": {"H": 1}}
    inputs = make_inputs("recursive_least_squares", variant, dtype=torch.float16, **shape)
    u = inputs.sequences["u"] / 4
    inputs = inputs.replace({name: x.float() for name, x in inputs.tensors.items() if name != "u"} | {"u": u})
    run = Inputs.run_both_ways if reverse else Inputs.run
    exact = gradients(inputs.map(torch.Tensor.double), run=run, backend="torch")
    actual = gradients(inputs, backend="triton", reverse=reverse)
    assert refused == [variant == "extreme_directions"]
    for name, value in exact.items():
        assert error(actual[name], value) <= (1e-3 if name == "gradient of u" else 2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("op", LEAST_SQUARES_OPS)
def test_least_squares_pass_over_padding_in_reverse(interpreted, op):
    inputs = make_inputs(op, tokens=20, dtype=torch.float32, sizes={"H": 1})
    mask = torch.rand((2, 20), generator=torch.Generator().manual_seed(0)) < 0.7
    expected = inputs.run_reversed(backend="reference", mask=mask.flip(1))
    actual = inputs.run(backend="triton", mask=mask, reverse=True)
    for name, value in results(expected[0][mask], expected[1]).items():
        torch.testing.assert_close(results(actual[0][mask], actual[1])[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_a_loss_on_the_output_alone_of_strided_inputs(interpreted, op):
    inputs = make_inputs(op, batch=1, tokens=2)
    strided = inputs.map(lambda x: torch.stack((x, x), dim=-2).float().unbind(-2)[1] if x.ndim >= 3 else x.float())
    assert not any(x.is_contiguous() for x in strided.tensors.values() if x.ndim >= 3)
    found = []
    for one, backend in ((strided, "triton"), (inputs, "reference")):
        leaves = one.map(lambda x: x.detach().requires_grad_())
        o, _ = leaves.run(backend=backend)
        grads = torch.autograd.grad(o.square().sum(), list(leaves.tensors.values()), materialize_grads=True)
        found.append([o.double(), *(grad.double() for grad in grads)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


STRIDED = [("linear_attention", "channel_gated"), ("orthogonal_recurrence", "gated"), ("delta_rule", "gated")]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant"), STRIDED)
def test_the_stride_of_a_single_token_does_not_matter(interpreted, op, variant):
    inputs = make_inputs(op, variant, tokens=1, dtype=torch.float32)
    strides = {name: (x.stride(0), x.numel(), *x.stride()[2:]) for name, x in inputs.sequences.items()}
    turned = inputs.replace({name: x.as_strided(x.shape, strides[name]) for name, x in inputs.sequences.items()})
    expected = gradients(inputs, backend="triton")
    for name, x in gradients(turned, backend="triton").items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("op", ["delta_rule", "selective_scan", "slot_attention"])  # a GPU compiles all
def test_compiled_graph_holds_the_kernel_whole(interpreted, op):
    inputs = make_inputs(op, batch=1, tokens=2, dtype=torch.float32, sizes={"H": 1})
    torch._dynamo.reset()
    compiled = torch.compile(inputs.run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(backend="triton"), inputs.run(backend="triton"))


def test_convolution_passes_over_padding(interpreted):
    inputs = make_inputs("short_convolution", "silu", batch=3, tokens=6, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    expected, actual = inputs.run(backend="reference", mask=mask), inputs.run(backend="triton", mask=mask)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "with_state"), [("silu", True), ("plain", False)])
def test_convolution_of_packed_segments_over_several_tiles(interpreted, variant, with_state):
    bounds = torch.tensor([0, 2, 2, 40, 41, 70], dtype=torch.int32)
    exact, actual = (
        make_inputs("short_convolution", variant, segments=5, tokens=70, dtype=dtype).map(lambda x: x.requires_grad_())
        for dtype in (torch.float64, torch.float32)
    )
    gradient = {}
    for inputs, backend in ((exact, "reference"), (actual, "triton")):
        state = {} if with_state else {"initial_state": None}
        y, last = inputs.run(backend=backend, cu_seqlens=bounds, **state)
        leaves = [x for name, x in inputs.tensors.items() if with_state or name != "initial_state"]
        gradient[backend] = [y, last, *torch.autograd.grad(y.square().sum() + last.sum(), leaves)]
    for ours, expected in zip(gradient["triton"], gradient["reference"], strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "reverse"), [("longhorn_scan", True), ("selective_scan", False)])
def test_diagonal_scans_in_parts_of_time(interpreted, monkeypatch, op, reverse):
    from longseq.kernels.diagonal_scan import triton_scan as kernels

    monkeypatch.setattr(kernels, "SHORTEST_PART", kernels.CHECKPOINT)
    monkeypatch.setattr(kernels, "FEWEST_PARTS", 1)
    split = []
    sequence_of_slots = kernels.sequence_of_slots
    monkeypatch.setattr(kernels, "sequence_of_slots", lambda *args: split.append(args) or sequence_of_slots(*args))
    options = {"cu_seqlens": torch.tensor([0, 3, 3, 50])}
    inputs = make_inputs(op, segments=3, tokens=50, sizes={"D": 2, "N": 20})
    exact = gradients(inputs, run=Inputs.run_reversed if reverse else Inputs.run, backend="reference", **options)
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), exact, reverse=reverse, **options)
    assert len(split) == 2  # forward and backward


@pytest.mark.slow
def test_diagonal_scans_in_parts_of_time_read_half_of_the_rows_in_reverse(interpreted, monkeypatch):
    from longseq.kernels.diagonal_scan import triton_scan as kernels

    monkeypatch.setattr(kernels, "SHORTEST_PART", kernels.CHECKPOINT)
    monkeypatch.setattr(kernels, "FEWEST_PARTS", 1)
    inputs = make_inputs("selective_scan", tokens=34, sizes={"D": 2, "N": 20}).with_own_parameters()
    exact = gradients(inputs, run=Inputs.run_both_ways, backend="reference")
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), exact, reverse="second_half")


SCAN_LAUNCHES = [
    *(("longhorn_scan", f"forward_{name}") for name in ("crowded", "doubled", "queued")),
    *(("selective_scan", f"forward_selective_{name}") for name in ("crowded", "doubled")),
]


def launch_as(monkeypatch, forward):
    """Have the scans launched as with many warps; return how often the forward kernel was."""
    from longseq.kernels.diagonal_scan.triton_scan import _Plan

    asked = Counter()

    def name(plan, kernel, channels):
        asked[kernel] += 1
        return forward if kernel == "forward" else f"{kernel}_crowded"

    monkeypatch.setattr(_Plan, "name", name)
    return asked


@pytest.mark.parametrize(("op", "forward"), SCAN_LAUNCHES)
@pytest.mark.slow
def test_diagonal_scans_of_more_warps_than_run_at_once(interpreted, monkeypatch, op, forward):
    asked = launch_as(monkeypatch, forward)
    inputs = make_inputs(op, batch=1, tokens=21, sizes={"N": 5})
    exact = gradients(inputs, backend="reference")
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), exact)
    assert asked["forward"] >= 1 <= asked["backward"]


@pytest.mark.slow
def test_convolution_of_many_taps_over_several_stretches(interpreted):
    """With weights for each direction."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (1, 90, 3), "weight": (2, 3, 9), "bias": (2, 3), "initial_state": (2, 3, 8)}
    exact = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    gradient = {}
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in exact.items()}
        y, _ = short_convolution(**leaves, activation="silu", reverse="second_half", backend=backend)
        gradient[backend] = [y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))]
    for ours, expected in zip(gradient["triton"], gradient["torch"], strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", TRITON_OPS)
def test_any_float64_input_is_a_reason_against_float32_kernels(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=4, dtype=torch.float32)
    for name in inputs.sequences.keys() | {name for name in inputs.tensors if name.startswith("initial_state")}:
        with pytest.raises(ValueError, match="the inputs are float64"):
            inputs.replace({name: inputs.arguments[name].double()}).run(backend="triton")


@pytest.mark.slow
def test_delta_rule_with_strong_gates_in_more_chunks_than_programs(interpreted, monkeypatch):
    from longseq.kernels.delta_rule import triton_channels

    monkeypatch.setattr(triton_channels, "SEARCHERS", 1)
    inputs = make_inputs("delta_rule", "channel_added_before", batch=2, tokens=35, sizes={"H": 1, "K": 4, "V": 4})
    inputs = inputs.replace({"g": 100 * inputs.sequences["g"]})
    assert_as_accurate_as_torch(inputs.map(torch.Tensor.float), gradients(inputs, backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "bounds"), [("channel", [0, 3, 3, 140]), ("channel_added_before", [0, 140])])
def test_delta_rule_by_channels_in_segments_of_time(interpreted, monkeypatch, variant, bounds):
    from longseq.kernels.delta_rule import triton_channels

    monkeypatch.setattr(triton_channels, "find_walk_span", lambda *sizes: 2)  # chunks of 32 tokens
    shape = {"tokens": 140, "segments": len(bounds) - 1, "sizes": {"H": 1, "K": 20, "V": 12}}
    inputs = make_inputs("delta_rule", variant, dtype=torch.float32, **shape)
    inputs = inputs.replace({"g": inputs.sequences["g"] * 0.02})  # the first token still affects the last segment
    bounds = torch.tensor(bounds)
    exact = gradients(inputs.map(torch.Tensor.double), run=Inputs.run_reversed, backend="torch", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds, reverse=True)
    for name, value in exact.items():
        assert error(actual[name], value) <= 2e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["channel", "channel_added_before"])
def test_compiled_graphs_know_the_layout_of_gradients(interpreted, variant):
    """Also for inputs whose heads lie apart in memory."""
    from longseq.kernels.delta_rule.triton_channels import delta_rule_channels, delta_rule_channels_backward

    inputs = make_inputs("delta_rule", variant, batch=1, tokens=20, dtype=torch.float32)
    apart = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.sequences.items()}
    tensors = [apart.get(name) for name in ("q", "k", "v", "beta", "write_key", "value_key", "g")]
    call, options = (*tensors, inputs.initial_state, None), (0.5, "before" in variant, 0)
    output, final, products = delta_rule_channels(*call, *options, True)
    backward = (*call, products, torch.ones_like(output), torch.ones_like(final), *options)
    torch.library.opcheck(delta_rule_channels_backward.registered, backward, test_utils="test_faketensor")


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "variant", "name"), LARGE_TOKENS)
def test_tokens_before_a_large_one_of_their_chunk_stay_accurate_on_the_gpu(op, variant, name):
    assert_accurate_before_a_large_token(op, variant, name, device="cuda", sizes={"H": 1})


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "variant", "dtype"), LARGE_QUERIES)
def test_gates_after_a_large_query_of_their_chunk_stay_accurate_on_the_gpu(op, variant, dtype):
    assert_gates_accurate_after_a_large_query(op, variant, dtype, device="cuda", sizes={"H": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("op", "variant", "name"), GATED)
def test_gradients_of_gates_are_accurate_on_the_gpu(op, variant, name, dtype):
    sizes = {"K": 64, "V": 64}
    inputs = make_inputs(op, variant, batch=1, tokens=150, dtype=torch.float32, device="cuda", sizes=sizes)
    for gate in (-3.0,) if "before" in variant else (-3.0, -8.0, -12.0, -18.0):
        strong = inputs.replace({name: torch.full_like(inputs.arguments[name], gate)})
        assert_gates_accurate(strong, name, dtype)
    if op == "delta_rule" and "channel" in variant:  # errors are relative to the largest token of a chunk
        return
    for large in ("q", "v") if dtype != torch.float16 else ("v",):
        for reset in (False, True):
            assert_gates_accurate(with_large_end(inputs, name, large, reset, place=40), name, dtype, slice(40))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("op", "variant"), CASES)
def test_nan_reaches_what_depends_on_it_on_the_gpu(op, variant, dtype):
    inputs = make_inputs(op, variant, batch=2, tokens=100, dtype=dtype, device="cuda", sizes={"H": 1})
    assert_nan_reaches_what_depends_on_it(inputs, place=37)


def heads(H, K, V=None):
    return {"H": H, "K": K, "V": K if V is None else V}


def slots(H, D, M):
    return {"H": H, "D": D, "M": M}


PACKED = (0, 3, 3, 700, 1999, 2000)
SHORT = (0, 64, 65, 700)
# Operation, variant, rows, tokens, sizes, options, and the borders of packed sequences.
GPU_CASES = [
    *(
        (op, variant, *shape, {}, None)
        for op in ("longhorn_scan", "selective_scan")
        for variant, *shape in (
            ("plain", 2, 197, {"D": 384, "N": 16}),
            ("plain", 1, 4097, {"D": 96, "N": 64}),
            ("plain", 3, 500, {"D": 100, "N": 5}),
            ("plain", 40, 530, {"D": 1024, "N": 16}),
        )
    ),
    ("short_convolution", "silu", 2, 197, {"D": 1152}, {}, None),
    ("short_convolution", "no_bias", 3, 1000, {"D": 100, "W": 3}, {}, None),
    ("convolved_features", "plain", 2, 197, heads(6, 64), {}, None),
    ("convolved_features", "elu_plus_one", 3, 1000, heads(2, 50), {}, None),
    ("convolved_features", "plain", 1, 4097, heads(4, 256), {}, None),
    ("delta_rule", "plain", 2, 197, heads(6, 64), {}, None),
    ("delta_rule", "plain", 1, 4097, heads(4, 64), {}, None),
    ("delta_rule", "plain", 2, 1000, heads(2, 256), {}, None),
    ("delta_rule", "plain", 3, 500, heads(2, 50), {}, None),
    ("delta_rule", "gated_write_key", 2, 300, heads(3, 64, 32), {}, None),
    ("delta_rule", "gated_write_key", 2, 1500, heads(2, 128, 64), {}, None),
    ("delta_rule", "gated", 1, 2000, heads(2, 128), {}, PACKED),
    ("delta_rule", "write_key", 1, 700, heads(2, 64), {}, SHORT),
    ("delta_rule", "write_key", 1, 1100, heads(2, 256, 128), {}, None),
    ("delta_rule", "gated", 1, 1100, heads(2, 96, 256), {}, None),
    # So many sequences and heads that nothing is cut into segments of time.
    ("delta_rule", "plain", 128, 197, heads(6, 64), {}, None),
    *(("delta_rule", "plain", 8, 2048, heads(2048 // width, width), {}, None) for width in (64, 128, 256)),
    ("delta_rule", "gated", 8, 2048, heads(16, 128), {}, None),
    # In segments of time.
    ("delta_rule", "plain", 1, 16384, heads(16, 128), {}, None),
    ("delta_rule", "gated_write_key", 1, 65536, heads(4, 128), {}, None),
    ("delta_rule", "write_key", 1, 4096, heads(8, 64), {}, None),
    ("delta_rule", "gated", 1, 16384, heads(8, 256), {}, (0, 100, 12100, 12228, 16384)),
    # With decays per channel, value keys or reads before the decay.
    ("delta_rule", "channel", 2, 197, heads(6, 64), {}, None),
    ("delta_rule", "channel", 1, 2000, heads(2, 128), {}, PACKED),
    ("delta_rule", "channel_write_key", 1, 4097, heads(2, 128, 64), {}, None),
    ("delta_rule", "extreme_channel_decay", 1, 700, heads(2, 96, 40), {}, SHORT),
    ("delta_rule", "channel_added_before", 2, 1000, heads(3, 64), {}, None),
    ("delta_rule", "channel", 1, 9000, heads(2, 128), {}, (0, 100, 6100, 6228, 9000)),
    ("delta_rule", "channel_added_before", 1, 4500, heads(2, 64), {}, None),
    ("delta_rule", "added", 2, 300, heads(2, 50), {}, None),
    ("delta_rule", "before", 1, 700, heads(2, 64, 128), {}, SHORT),
    ("linear_attention", "plain", 2, 300, heads(3, 64, 32), {}, None),
    ("linear_attention", "plain", 2, 1100, heads(2, 512), {}, None),
    ("linear_attention", "head_gated", 2, 300, heads(3, 128, 64), {}, None),
    ("linear_attention", "extreme_head_decay", 1, 2000, heads(2, 64), {}, PACKED),
    ("linear_attention", "grouped", 2, 300, heads(4, 128, 64) | {"G": 1}, {}, None),
    ("linear_attention", "grouped", 1, 2000, heads(4, 40, 96), {}, PACKED),
    ("linear_attention", "grouped_plain", 2, 300, heads(4, 512, 256), {}, None),
    ("linear_attention", "channel_gated", 8, 2048, heads(16, 128), {}, None),
    ("linear_attention", "channel_gated", 1, 16384, heads(2, 128), {}, None),
    ("linear_attention", "channel_gated", 1, 2000, heads(2, 64, 512), {}, PACKED),
    ("linear_attention", "extreme_channel_decay", 1, 700, heads(2, 96, 40), {}, SHORT),
    ("linear_attention", "value_gated", 2, 300, heads(3, 128), {}, None),
    ("linear_attention", "value_gated", 1, 2000, heads(2, 512, 64), {}, PACKED),
    ("linear_attention", "extreme_value_decay", 1, 700, heads(2, 40, 96), {}, SHORT),
    # In segments of time.
    ("linear_attention", "plain", 1, 49152, heads(8, 128), {}, None),
    ("linear_attention", "channel_gated", 1, 16384, heads(8, 256), {}, (0, 100, 12100, 12228, 16384)),
    ("slot_attention", "plain", 1, 16384, {**heads(8, 128), "M": 64}, {}, None),
    ("slot_attention", "plain", 8, 2048, {**heads(4, 512), "M": 16}, {}, None),
    ("slot_attention", "plain", 1, 2000, {**heads(2, 512), "M": 64}, {}, PACKED),
    ("slot_attention", "write", 1, 700, {**heads(2, 96, 40), "M": 100}, {}, None),
    ("slot_attention", "relu_squared", 1, 700, {**heads(2, 64, 128), "M": 32}, {}, SHORT),
    ("orthogonal_recurrence", "plain", 2, 197, slots(6, 64, 64), {}, None),
    ("orthogonal_recurrence", "encode", 2, 300, slots(3, 64, 32), {}, None),
    ("orthogonal_recurrence", "similarity", 1, 400, slots(2, 16, 16), {}, (0, 3, 3, 150, 399, 400)),
    ("orthogonal_recurrence", "ttt", 70, 70, slots(6, 64, 32), {}, None),
    ("orthogonal_recurrence", "unnormalized", 1, 200, slots(2, 128, 128), {}, None),
    ("orthogonal_recurrence", "ttt", 1, 2100, slots(2, 64, 64), {"chunk_size": 16}, None),
    ("orthogonal_recurrence", "ttt", 1, 400, slots(2, 128, 128), {"chunk_size": 32}, (0, 3, 3, 150, 399, 400)),
    ("orthogonal_recurrence", "ttt", 2, 300, slots(3, 128, 100), {"chunk_size": 16}, None),
    ("orthogonal_recurrence", "ttt", 2, 300, slots(3, 128, 128), {"chunk_size": 64}, None),
    ("recursive_least_squares", "plain", 2, 300, {"H": 3, "K": 64}, {}, None),
    ("recursive_least_squares", "plain", 1, 16384, {"H": 2, "K": 64}, {}, None),
    ("recursive_least_squares", "no_refresh", 1, 5000, {"H": 2, "K": 64}, {}, None),
    ("recursive_least_squares", "extreme_directions", 1, 700, {"H": 2, "K": 50}, {}, SHORT),
    ("recursive_least_squares", "plain", 1, 2000, {"H": 2, "K": 32}, {}, PACKED),
    ("variational_linear_attention", "paper", 8, 2048, heads(16, 64), {}, None),
    ("variational_linear_attention", "paper", 1, 5000, heads(2, 64), {}, None),
    ("variational_linear_attention", "plain", 1, 5000, heads(2, 64, 128), {}, None),
    ("variational_linear_attention", "plain", 1, 2000, heads(2, 32, 40), {}, PACKED),
]
# The widths at which the readings of all operations are compared.
WIDTHS = {"H": 2, "K": 64, "V": 64, "M": 16, "D": 32, "N": 16}


def make_on_the_gpu(op, variant, dtype, **options):
    """Inputs on the GPU, with float32 states as models keep them."""
    inputs = make_inputs(op, variant, dtype=torch.float32, device="cuda", **options)
    if op == "orthogonal_recurrence":  # longer vectors turn the slots so far that errors grow from token to token
        unit = {name: torch.nn.functional.normalize(inputs.sequences[name], dim=-1) for name in "qkv"}
        inputs = inputs.replace(unit)
    return inputs.replace({name: x.to(dtype) for name, x in inputs.tensors.items() if "initial_state" not in name})


def assert_accurate_on_the_gpu(inputs, dtype, **options):
    """The self-test's tolerance of each head and chunk, and the same bits in every run."""
    exact = gradients(inputs.map(torch.Tensor.double), backend="torch", **options)
    plain = gradients(inputs, backend="torch", **options)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory is NaN until it is written
    try:
        runs = [gradients(inputs, backend="triton", **options) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in exact.items():
        worst = Bar.of(value, plain[name], inputs.tokens, dtype).find_worst(runs[0][name])
        assert worst.share <= 1, (name, worst)
        assert all(torch.equal(run[name], runs[0][name]) for run in runs[1:]), f"{name} differs from run to run"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("op", "variant", "batch", "tokens", "sizes", "options", "bounds"), GPU_CASES)
def test_real_sizes_on_the_gpu(op, variant, batch, tokens, sizes, options, bounds, dtype):
    shape = {"batch": batch, "tokens": tokens, "sizes": sizes, "segments": bounds and len(bounds) - 1}
    if bounds is not None:
        options = {**options, "cu_seqlens": torch.tensor(bounds, device="cuda")}
    assert_accurate_on_the_gpu(make_on_the_gpu(op, variant, dtype, **shape), dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [197, 1501])
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if takes(op, "reverse")])
def test_reading_in_reverse_on_the_gpu(op, tokens, dtype):
    inputs = make_on_the_gpu(op, None, dtype, batch=4, tokens=tokens, sizes=WIDTHS)
    assert_accurate_on_the_gpu(inputs, dtype, reverse=True)
    for own in (inputs, inputs.with_own_parameters()) if inputs.parameters else (inputs,):
        assert_accurate_on_the_gpu(own, dtype, reverse="second_half")
    bounds = torch.tensor([0, 50, 50, 51, tokens], device="cuda")
    packed = make_on_the_gpu(op, None, dtype, tokens=tokens, segments=4, sizes=WIDTHS)
    assert_accurate_on_the_gpu(packed, dtype, reverse=True, cu_seqlens=bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("op", "variant"),
    [
        (op, variant)
        for op in TRITON_OPS
        if takes(op, "reverse")
        for index, variant in enumerate(list_variants(op))
        if index == 0 or variant.startswith("extreme")
        if (op, variant) != ("orthogonal_recurrence", "extreme_decay")
    ],
)
def test_as_many_rows_as_a_batch_of_images_on_the_gpu(op, variant, dtype):
    """More than the programs of kernels that take several rows each.

    Of so many rows, some cancel in the gradients of `orthogonal_recurrence` where its state has decayed to zero:
    float32 itself is then off by up to 0.3.
    """
    inputs = make_on_the_gpu(op, variant, dtype, batch=512, tokens=64, sizes=WIDTHS)
    assert_accurate_on_the_gpu(inputs, dtype, reverse="second_half")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reverse", [True, "second_half"])
@pytest.mark.parametrize(("variant", "chunk_size"), [("gated", 1), ("encode", 1), ("ttt", 1), ("ttt", 16), ("ttt", 64)])
def test_orthogonal_recurrence_in_reverse_on_the_gpu(variant, chunk_size, reverse, dtype):
    inputs = make_on_the_gpu("orthogonal_recurrence", variant, dtype, batch=4, tokens=300, sizes=slots(3, 64, 64))
    assert_accurate_on_the_gpu(inputs, dtype, reverse=reverse, chunk_size=chunk_size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", LEAST_SQUARES_OPS)
def test_least_squares_pass_over_padding_on_the_gpu(op, dtype):
    inputs = make_on_the_gpu(op, None, dtype, tokens=1300, sizes=heads(3, 64))
    mask = torch.rand((2, 1300), device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < 0.9
    for reverse in (False, True):
        assert_accurate_on_the_gpu(inputs, dtype, reverse=reverse, mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("variant", ["plain", "gated"])
@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 3000, 3001, 4200)], ids=["one_sequence", "packed"])
def test_delta_rule_in_segments_of_time_on_the_gpu(monkeypatch, bounds, variant, width, dtype):
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "_find_span", lambda *sizes: 7 if width <= 128 or dtype != torch.float32 else 0)
    shape = {"batch": 1, "tokens": 4200, "sizes": heads(2, width), "segments": bounds and len(bounds) - 1}
    inputs = lasting(make_on_the_gpu("delta_rule", variant, dtype, **shape))
    if variant == "gated":
        inputs = inputs.replace({"g": 0.001 * inputs.sequences["g"]})
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    for reverse in (False, True):
        assert_accurate_on_the_gpu(inputs, dtype, reverse=reverse, **options)
    if variant == "plain":  # queries and write keys that the backward pass weighs again have the same bits
        kept = gradients(inputs, backend="triton", **options)
        monkeypatch.setattr(triton_delta, "KEPT_ROWS", 0)
        weighed = gradients(inputs, backend="triton", **options)
        assert all(torch.equal(weighed[name], value) for name, value in kept.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("variant", GATES)
@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 3000, 3001, 4200)], ids=["one_sequence", "packed"])
def test_linear_attention_in_segments_of_time_on_the_gpu(monkeypatch, bounds, variant, width, dtype):
    from longseq.kernels.linear_attention import triton_linear

    monkeypatch.setattr(triton_linear, "find_walk_span", lambda *sizes: 7)
    shape = {"batch": 1, "tokens": 4200, "sizes": heads(2, width), "segments": bounds and len(bounds) - 1}
    inputs = weaken_gates(make_on_the_gpu("linear_attention", variant, dtype, **shape), variant)
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    for reverse in (False, True):
        assert_accurate_on_the_gpu(inputs, dtype, reverse=reverse, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("op", "forward"), SCAN_LAUNCHES)
def test_diagonal_scans_of_more_warps_than_run_at_once_on_the_gpu(monkeypatch, op, forward, dtype):
    asked = launch_as(monkeypatch, forward)
    inputs = make_on_the_gpu(op, None, dtype, tokens=197, sizes={"D": 384, "N": 16})
    assert_accurate_on_the_gpu(inputs, dtype)
    assert asked["forward"] >= 1 <= asked["backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [500, 1500])
@pytest.mark.parametrize("op", ["delta_rule", "linear_attention", "slot_attention"])
def test_half_precision_values_beside_float32_keys_on_the_gpu(op, tokens):
    inputs = make_on_the_gpu(op, None, torch.bfloat16, tokens=tokens, sizes=WIDTHS)
    wide = inputs.replace({name: inputs.arguments[name].float() for name in ("q", "k")})
    assert_accurate_on_the_gpu(wide, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("op", TRITON_OPS)
def test_compiled_graph_takes_any_length_on_the_gpu(op):
    torch._dynamo.reset()  # graphs of earlier operations would count towards the limit of recompilations
    compiled = torch.compile(lambda inputs: inputs.run(backend="triton"), dynamic=True)
    for tokens in (300, 1100, 64):
        inputs = make_inputs(op, tokens=tokens, dtype=torch.float32, device="cuda")
        torch.testing.assert_close(compiled(inputs), inputs.run(backend="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("op", TRITON_OPS)
def test_compiled_graph_holds_the_kernel(op):
    torch._dynamo.reset()
    inputs = make_inputs(op, tokens=64, dtype=torch.float32, device="cuda")
    compiled = torch.compile(lambda inputs: inputs.run(backend="triton"), fullgraph=True)
    torch.testing.assert_close(gradients(inputs, run=compiled), gradients(inputs, backend="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("op", TRITON_OPS)
def test_cuda_graph_replays_the_kernel(op):
    inputs = make_inputs(op, tokens=64, dtype=torch.float32, device="cuda")
    expected = inputs.run(backend="triton")[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = inputs.run(backend="triton")[0]
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)
