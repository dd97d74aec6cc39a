"""The Triton kernels: interpreted on the CPU at tiny shapes, and at real ones on a GPU."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from longseq.kernels import (
    delta_rule,
    explain,
    linear_attention,
    list_ops,
    longhorn_scan,
    orthogonal_recurrence,
    recursive_least_squares,
    selective_scan,
    short_convolution,
    slot_attention,
    variational_linear_attention,
)
from longseq.kernels.dispatch import backends
from longseq.kernels.packing import Packing
from longseq.kernels.testing import (
    Inputs,
    assert_accurate,
    convolved_features,
    error,
    gradients,
    list_variants,
    make_inputs,
    results,
    takes,
)

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
    # Every variant reads several tokens of two rows. The first reads two heads as well, and one token.
    first = variant == list_variants(op)[0]
    for tokens, sizes in ((11, {}), (1, {})) if first else ((11, {"H": 1}),):
        exact = gradients(make_inputs(op, variant, tokens=tokens, sizes=sizes), backend="reference")
        assert_as_accurate_as_torch(make_inputs(op, variant, tokens=tokens, sizes=sizes, dtype=torch.float32), exact)


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_packed_segments_are_separate(interpreted, op):
    bounds = torch.tensor([0, 3, 3, 4, 11])
    variant = list_variants(op)[0]
    exact = gradients(make_inputs(op, variant, segments=4, tokens=11), backend="reference", cu_seqlens=bounds)
    inputs = make_inputs(op, variant, segments=4, tokens=11, dtype=torch.float32)
    assert_as_accurate_as_torch(inputs, exact, cu_seqlens=Packing(bounds))


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_gradients_of_a_part_that_runs_again(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=3, dtype=torch.float32)
    expected = gradients(inputs, backend="triton")
    actual = gradients(inputs, run=Inputs.run_checkpointed, backend="triton")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_second_derivatives_are_refused(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=3, dtype=torch.float32).map(lambda x: x.requires_grad_())
    output = results(*inputs.run(backend="triton"))["output"]
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(output.sum(), list(inputs.tensors.values()), create_graph=True, allow_unused=True)


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if takes(op, "reverse")])
@pytest.mark.parametrize("packed", [False, True], ids=["one_segment", "packed"])
def test_reading_in_reverse(interpreted, op, packed):
    # More than a chunk of the delta rule's float32 form, and than a checkpoint of the scans. Kernels that are
    # interpreted token by token have tests of their own.
    tokens = {"orthogonal_recurrence": 7, "longhorn_scan": 18, "selective_scan": 18}.get(op, 35)
    bounds = (0, 3, 3, tokens - 1, tokens)
    # Two heads are read in packed segments, two rows without.
    shape = {"segments": len(bounds) - 1} if packed else {"sizes": {"H": 1}}
    options = {"cu_seqlens": torch.tensor(bounds)} if packed else {}
    # Operations on single tokens, or on their contents, do not depend on the order, and contents are read in any.
    unordered = ("identity", "relu_squared", "repeated_directions", "extreme_directions", "fixed", "paper",
                 "beta_0", "beta_1", "repeated_keys", "extreme_decay")  # fmt: skip
    # Two variants are enough in packed segments: all gates are read in the same order.
    for variant in [name for name in list_variants(op)[: 2 if packed else 4] if name not in unordered]:
        inputs = make_inputs(op, variant, tokens=tokens, **shape)
        exact = gradients(inputs, run=Inputs.run_reversed, backend="reference", **options)
        inputs = make_inputs(op, variant, tokens=tokens, dtype=torch.float32, **shape)
        assert_as_accurate_as_torch(inputs, exact, reverse=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "variant", "tokens"),
    [
        ("delta_rule", "gated_write_key", 35),  # more than a chunk of float32
        ("linear_attention", "head_gated", 35),
        ("linear_attention", "channel_gated", 35),
        ("linear_attention", "value_gated", 3),
        ("longhorn_scan", "plain", 18),  # more than a checkpoint's
        ("selective_scan", "plain", 18),
        ("short_convolution", "silu", 35),
        ("convolved_features", "plain", 35),
        ("slot_attention", "write", 35),
        ("recursive_least_squares", "plain", 18),  # more than a chunk of float32
        ("variational_linear_attention", "plain", 35),
    ],
)
def test_reading_half_of_the_rows_in_reverse(interpreted, op, variant, tokens):
    inputs = make_inputs(op, variant, tokens=tokens)
    for own in (inputs, inputs.with_own_parameters()) if inputs.parameters else (inputs,):
        exact = gradients(own, run=Inputs.run_both_ways, backend="reference")
        assert_as_accurate_as_torch(own.map(torch.Tensor.float), exact, reverse="second_half")


def _differentiate_gated(q, k, v, d_output, *, scale=0.125, backend, **gates):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates.values())]
    output, _ = linear_attention(
        *leaves[:3], **dict(zip(gates, leaves[3:], strict=True)), scale=scale, output_final_state=False, backend=backend
    )
    return dict(zip("oqkvg", (output, *torch.autograd.grad(output, leaves, d_output)), strict=True))


@pytest.mark.parametrize("silent", ["first chunk", "last chunk", None])
@pytest.mark.parametrize("scale", [0.125, -0.125])
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


@pytest.mark.parametrize("gate", ["g", "g_value"])
@pytest.mark.parametrize("size", [1e-30, 1e28])
def test_linear_attention_of_tiny_and_huge_values(interpreted, gate, size):
    q, k, v, d_output = torch.randn(4, 1, 64, 1, 64, dtype=torch.bfloat16)
    v *= size
    gates = {gate: torch.full((1, 64, 1, 64), -0.94)}  # the strongest gates that one chunk takes at once
    exact = _differentiate_gated(
        *(x.double() for x in (q, k, v, d_output)), **{gate: gates[gate].double()}, backend="torch"
    )
    for name, value in _differentiate_gated(q, k, v, d_output, **gates, backend="triton").items():
        assert error(value.double() / exact[name].abs().max(), exact[name] / exact[name].abs().max()) <= 2e-2, name


class _WithFakes(TorchDispatchMode):
    """Calls each of our operations on fake tensors, too, and records the memory layout of the results."""

    def __init__(self):
        super().__init__()
        self.results = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "longseq":
            with FakeTensorMode() as mode:
                fake = function(*tree_map_only(torch.Tensor, mode.from_tensor, args))
            self.results[str(function)] = tuple([self._describe(x) for x in tree_leaves(y)] for y in (result, fake))
        return result

    @staticmethod
    def _describe(x):
        strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
        return x.dtype, x.shape, strides if x.numel() else []


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_fake_results_are_like_real_ones_in_shape_and_strides(interpreted, op, dtype):
    # torch.compile plans its buffers with fake tensors, and fails if a real one has another layout.
    inputs = make_inputs(op, tokens=11, dtype=dtype)
    calls = [(inputs, {})]
    if inputs.parameters and takes(op, "reverse"):
        calls.append((inputs.with_own_parameters(), {"reverse": "second_half"}))
    for call, options in calls:
        with _WithFakes() as watched:
            gradients(call, backend="triton", **options)
        assert len(watched.results) >= 2, "a forward and a backward pass"
        for name, (real, fake) in watched.results.items():
            assert real == fake, name


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", DELTA_FORMS)
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
@pytest.mark.parametrize("form", DELTA_FORMS)
def test_delta_rule_reads_half_of_the_rows_in_reverse_in_half_precision(interpreted, form):
    inputs = make_inputs("delta_rule", "gated_write_key", tokens=70, dtype=torch.float16)
    exact = gradients(inputs.map(torch.Tensor.double), run=Inputs.run_both_ways, backend="reference")
    for name, value in delta_results(inputs, form, reverse="second_half").items():
        assert error(value, exact[name]) <= 3e-3, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "reverse", "dtype"),
    [
        ("walked", False, torch.float16),
        ("walked", True, torch.bfloat16),
        ("read", True, torch.float16),
        ("trained", False, torch.bfloat16),
        ("trained", True, torch.float16),
    ],
)
def test_delta_rule_over_several_chunks(interpreted, form, dtype, reverse):
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has two chunks
    inputs = make_inputs("delta_rule", "gated_write_key", tokens=70, segments=4, dtype=dtype)
    run = Inputs.run_reversed if reverse else Inputs.run
    exact = gradients(inputs.map(torch.Tensor.double), run=run, backend="reference", cu_seqlens=bounds)
    for name, value in delta_results(inputs, form, cu_seqlens=bounds, reverse=reverse).items():
        # float16 products for every dtype, then rounding; the interpreter truncates bfloat16.
        assert error(value, exact[name]) <= 2e-3 + torch.finfo(dtype).eps, name


@pytest.fixture
def spoiled_memory():
    """New tensors hold NaN until something is written into them."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "gated_write_key"])
@pytest.mark.parametrize("tokens", [5, 16, 17, 48, 49, 80, 81])
@pytest.mark.parametrize("form", DELTA_FORMS)
def test_delta_rule_ends_within_a_chunk(interpreted, spoiled_memory, form, tokens, variant):
    """Up to 16 last tokens take a way of their own, and nothing past the last token is read from memory."""
    assert torch.empty(1).isnan(), "the memory is spoiled"
    inputs = make_inputs("delta_rule", variant, tokens=tokens, dtype=torch.float16)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    for name, value in delta_results(inputs, form).items():
        assert error(value, exact[name]) <= 4e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("form", DELTA_FORMS)
def test_delta_rule_inverts_for_repeated_keys_in_half_precision(interpreted, form):
    inputs = make_inputs("delta_rule", "repeated_keys", tokens=70, batch=1, dtype=torch.float16)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    for name, value in delta_results(inputs, form).items():
        # With strengths near 2, the first of 64 errors persists to the last token; a wrong inverse is off by more than
        # 1.
        assert error(value, exact[name]) <= 2e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("form", DELTA_FORMS)
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


# The relative error of truncation to bfloat16, as in the interpreter; that of rounding is half as large.
CUT_OFF = torch.finfo(torch.bfloat16).eps / 4


def delta_errors(form, factors, part=slice(None), outlier=None):
    """Relative errors of a delta rule in bfloat16, of its output and gradients in a part of time: ours and torch's.

    Inputs are multiplied by `factors`, all of them or those of the token `outlier`.
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


@pytest.mark.parametrize("form", DELTA_FORMS)
@pytest.mark.parametrize(
    "factors",
    [
        {"q": 1e6},
        {"q": 1e-6},
        {"k": 1e-6},
        {"k": 1e6, "beta": 1e-12, "initial_state": 1e-6},
        {"v": 1e20, "initial_state": 1e20},
        {"v": 1e-20, "initial_state": 1e-20},
    ],
    ids=str,
)
def test_delta_rule_takes_inputs_of_any_size(interpreted, form, factors):
    for name, (ours, plain) in delta_errors(form, factors).items():
        assert ours <= 3 * max(plain, CUT_OFF), name


@pytest.mark.parametrize("form", DELTA_FORMS)
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_delta_rule_keeps_tokens_beside_a_large_one(interpreted, form, names):
    factors = dict.fromkeys(names, 1e4)
    for name, (ours, plain) in delta_errors(form, factors, slice(20), outlier=20).items():
        assert ours <= 3 * max(plain, CUT_OFF), name


@pytest.mark.slow
@pytest.mark.parametrize("form", ["trained", "read"])
def test_delta_rule_keeps_tokens_beside_a_large_key_that_is_orthogonal_to_theirs(interpreted, form):
    # The chunk's inverse is mild, as no key meets another, and yet what it adds to the state is 10^12 times the state.
    inputs = make_inputs("delta_rule", "plain", batch=1, tokens=64, dtype=torch.float32, sizes={"H": 1, "K": 64})
    keys = torch.eye(64)[None, :, None].clone()
    keys[:, 40] *= 1e6
    inputs = inputs.replace({"k": keys, "beta": torch.ones(1, 64, 1)}).map(torch.Tensor.bfloat16)
    exact, plain = (x.run(backend="torch")[0][:, :40] for x in (inputs.map(torch.Tensor.double), inputs))
    ours = delta_results(inputs, form)["output"][:, :40]
    assert error(ours, exact) <= 3 * max(error(plain, exact), CUT_OFF)


# Operations that read a chunk of tokens at once, and the input of which one token is large.
LARGE_TOKENS = [
    ("linear_attention", "plain", "v"),
    ("linear_attention", "head_gated", "v"),
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


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant", "name"), LARGE_TOKENS)
def test_tokens_before_a_large_one_of_their_chunk_stay_accurate(interpreted, op, variant, name):
    assert_accurate_before_a_large_token(op, variant, name, device="cpu", sizes={"H": 1})


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
    ("linear_attention", "channel_gated", torch.float32),
    ("linear_attention", "extreme_channel_decay", torch.float32),
    ("linear_attention", "value_gated", torch.float32),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant", "dtype"), LARGE_QUERIES)
def test_gates_after_a_large_query_of_their_chunk_stay_accurate(interpreted, op, variant, dtype):
    assert_gates_accurate_after_a_large_query(op, variant, dtype, device="cpu", sizes={"H": 1})


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
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gate", [-3.0, -8.0, -12.0, -18.0])  # Gated DeltaNet's reach -16 with the usual A
@pytest.mark.parametrize(("op", "variant", "name"), GATED)
def test_gradients_of_strong_gates_are_accurate(interpreted, op, variant, name, gate, dtype):
    inputs = make_inputs(op, variant, batch=1, tokens=70, dtype=torch.float32)
    assert_gates_accurate(inputs.replace({name: torch.full_like(inputs.arguments[name], gate)}), name, dtype)


# The large argument, and the type. A gradient of 1e4 times larger queries is more than float16 holds.
LARGE_ENDS = [
    pytest.param(large, dtype, id=f"{large}-{dtype}".replace("torch.", ""))
    for large in ("q", "v")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if (large, dtype) != ("q", torch.float16)
]


@pytest.mark.slow
@pytest.mark.parametrize("place", [8, 40])  # gates per channel in half precision: 8 small tokens of a chunk, or more
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(("large", "dtype"), LARGE_ENDS)
@pytest.mark.parametrize(("op", "variant", "name"), GATED)
def test_gradients_of_gates_hold_nothing_of_larger_tokens_behind_them(
    interpreted, op, variant, name, large, reset, dtype, place
):
    inputs = make_inputs(op, variant, batch=1, tokens=70, dtype=torch.float32)
    assert_gates_accurate(with_large_end(inputs, name, large, reset, place), name, dtype, slice(place))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "name"), [case[1:] for case in GATED if case[0] == "linear_attention"])
def test_gradients_of_gates_between_empty_and_larger_tokens(interpreted, variant, name):
    inputs = make_inputs("linear_attention", variant, batch=1, tokens=64, dtype=torch.float32)
    changed = {key: inputs.arguments[key].clone() for key in ("q", "k", "v")}
    for x in changed.values():
        x[:, :8] = 0  # as padding on the left is
    changed["v"][:, 40:] *= 1e4
    assert_gates_accurate(inputs.replace(changed), name, torch.float16, slice(8, 40))


def with_large_end(inputs, gates, large, reset, place):
    """Inputs whose tokens from `place` on are 1e4 times larger; if `reset`, a gate forgets what was before them."""
    changed = {key: inputs.arguments[key].clone() for key in (gates, large)}
    changed[large][:, place:] *= 1e4
    if reset:
        changed[gates][:, place] = -30
    return inputs.replace(changed)


def assert_gates_accurate(inputs, name, dtype, part=slice(None)):
    """The gradient of the gates in a part of time: its error is at most three times that of torch's form."""
    inputs = inputs.map(lambda x: x.to(dtype))
    forms = [(inputs.map(torch.Tensor.double), "torch"), (inputs, "torch"), (inputs, "triton")]
    exact, plain, ours = (
        gradients(x, backend=backend)[f"gradient of {name}"][:, part].double() for x, backend in forms
    )
    assert exact.abs().max() > 0
    # The GPU's exp is 1e-6 off, and more for large arguments. Tiles round each factor to 11 bits, as float16 does.
    limit = {torch.bfloat16: CUT_OFF, torch.float16: 2**-11}.get(dtype, 2.5e-6 if ours.is_cuda else 1e-6)
    assert (ours - exact).norm() <= 3 * max((plain - exact).norm() / exact.norm(), limit) * exact.norm()


# The plainest inputs of each operation, and those with steps of their own that a NaN could get lost in.
NAN_CASES = [(op, list_variants(op)[0]) for op in TRITON_OPS]
NAN_CASES += [("linear_attention", f"{kind}_gated") for kind in ("head", "channel", "value")]
NAN_CASES += [("linear_attention", f"extreme_{kind}_decay") for kind in ("channel", "value")]
NAN_CASES += [("convolved_features", feature) for feature in ("relu", "elu_plus_one")]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant"), NAN_CASES)
def test_nan_reaches_what_depends_on_it(interpreted, op, variant):
    inputs = make_inputs(op, variant, batch=2, tokens=5, dtype=torch.bfloat16, sizes={"H": 1})
    assert_nan_reaches_what_depends_on_it(inputs, place=2)


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
@pytest.mark.parametrize("variant", ["plain", "gated_write_key"])
@pytest.mark.parametrize(("name", "factor"), [("k", 30.0), ("v", math.inf), ("k", math.nan)])
def test_delta_rule_without_gradients_leaves_chunks_before_a_steep_one_alone(interpreted, variant, name, factor):
    # A chunk of 32 tokens that is not mild is read with another inverse, and the whole sequence may be read again.
    inputs = make_inputs("delta_rule", variant, batch=1, tokens=70, dtype=torch.bfloat16, sizes={"H": 1})
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


@pytest.mark.parametrize(("tokens", "limit", "kept"), [(1024, 1 << 19, False), (2048, 1 << 19, True), (2048, 1, False)])
def test_delta_rule_keeps_queries_and_keys_without_a_gate_only_of_few_segments(
    interpreted, monkeypatch, tokens, limit, kept
):
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "KEPT_ROWS", limit)
    x = torch.randn(1, tokens, 1, 64, dtype=torch.float16)

    def count_kept(**gates):
        saved = []
        arguments = [y.clone().requires_grad_() for y in (x, x / 8, x, x[..., 0])]
        with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
            delta_rule(*arguments, **gates, backend="triton")
        inputs = {y.data_ptr() for y in (*arguments, *gates.values())}
        return sum(y.numel() * y.itemsize for y in saved if y.data_ptr() not in inputs)

    gated, plain = count_kept(g=-torch.rand(1, tokens, 1)), count_kept()
    assert (gated - plain < x.numel() * x.itemsize) == kept
    assert kept or gated - plain >= 2 * x.numel() * x.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["repeated_keys", "extreme_decay"])
def test_delta_rule_over_several_float32_chunks(interpreted, variant):
    exact = gradients(make_inputs("delta_rule", variant, batch=1, tokens=70), backend="reference")
    assert_as_accurate_as_torch(make_inputs("delta_rule", variant, batch=1, tokens=70, dtype=torch.float32), exact)


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
@pytest.mark.parametrize(
    ("variant", "reverse", "limit"),
    [("repeated_keys", False, 1 << 20), ("repeated_keys", False, 1), ("gated_write_key", True, 1)],
)
def test_delta_rule_in_segments_of_time(interpreted, delta_segments, monkeypatch, variant, reverse, limit):
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "KEPT_ROWS", limit)  # bytes of weighed queries and keys: more are weighed again
    bounds = torch.tensor([0, 3, 3, 390, 392, 560])  # sequences of one, no, four, one and two segments
    inputs = lasting(make_inputs("delta_rule", variant, tokens=560, segments=5, dtype=torch.float16, sizes={"H": 1}))
    if "g" in inputs.sequences:
        inputs = inputs.replace({"g": 0.01 * inputs.sequences["g"]})
    run = Inputs.run_reversed if reverse else Inputs.run
    exact = gradients(inputs.map(torch.Tensor.double), run=run, backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds, reverse=reverse)
    assert set(delta_segments) == {560 // 128 + 6}
    for name, value in exact.items():
        assert error(actual[name], value) <= 3e-3, name
    again = gradients(inputs, backend="triton", cu_seqlens=bounds, reverse=reverse, recompute=True)
    assert all(torch.equal(again[name], value) for name, value in actual.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "reverse"), [("plain", False), ("repeated_keys", True), ("gated_write_key", "second_half")]
)
def test_two_programs_share_a_chunk_of_few_with_the_same_bits(
    interpreted, delta_segments, monkeypatch, variant, reverse
):
    from longseq.kernels.delta_rule import triton_delta

    programs = []

    class Noted(triton_delta.Prepared):
        def __init__(self, kernel, device, count, *rest, **constants):
            super().__init__(kernel, device, count, *rest, **constants)
            if constants.get("PARTS") and not constants["AGAIN"]:
                programs.append(count)

    monkeypatch.setattr(triton_delta, "Prepared", Noted)
    inputs = make_inputs("delta_rule", variant, tokens=300, dtype=torch.float16, sizes={"H": 1, "V": 80})

    def compute(chunks):
        monkeypatch.setattr(triton_delta, "SHARED_CHUNKS", chunks)
        triton_delta._prepare_forward.cache_clear()
        return gradients(inputs, backend="triton", reverse=reverse)

    try:
        apart, shared = compute(9), compute(10)  # two rows of five chunks
        assert programs == [10, 20]
        assert all(torch.equal(shared[name], value) for name, value in apart.items())
    finally:
        triton_delta._prepare_forward.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "extreme_decay"])
def test_delta_rule_in_segments_of_time_in_float32(interpreted, delta_segments, variant):
    exact, inputs = (
        lasting(make_inputs("delta_rule", variant, batch=1, tokens=270, dtype=dtype, sizes={"H": 1, "K": 20}))
        for dtype in (torch.float64, torch.float32)
    )
    assert_as_accurate_as_torch(inputs, gradients(exact, backend="reference"))
    assert set(delta_segments) == {5}


@pytest.mark.slow
def test_delta_rule_in_segments_of_time_reads_half_of_the_rows_in_reverse(interpreted, delta_segments):
    inputs = lasting(make_inputs("delta_rule", "gated", tokens=300, dtype=torch.float16, sizes={"H": 1}))
    inputs = inputs.replace({"g": 0.01 * inputs.sequences["g"]})
    exact = gradients(inputs.map(torch.Tensor.double), run=Inputs.run_both_ways, backend="torch")
    for name, value in gradients(inputs, backend="triton", reverse="second_half").items():
        assert error(value, exact[name]) <= 3e-3, name
    assert set(delta_segments) == {2 * 3}  # of two chunks, the last one of each row of one


@pytest.mark.slow
def test_delta_rule_in_segments_of_time_from_no_state(interpreted, delta_segments):
    inputs = lasting(
        make_inputs("delta_rule", "gated", tokens=600, batch=1, dtype=torch.float16, sizes={"H": 1, "V": 80})
    )

    def gradients_of(backend, dtype):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.sequences.items()}
        o, _ = delta_rule(**leaves, backend=backend)
        return [o, *torch.autograd.grad(o.square().sum(), list(leaves.values()))]

    for ours, exact in zip(gradients_of("triton", torch.float16), gradients_of("torch", torch.float64), strict=True):
        assert error(ours, exact) <= 3e-3
    assert set(delta_segments) == {5}


@pytest.mark.slow
def test_delta_rule_walks_with_wide_states_in_pieces(interpreted, delta_segments):
    sizes = {"H": 1, "K": 130, "V": 20}
    inputs = lasting(
        make_inputs("delta_rule", "gated_write_key", tokens=300, batch=1, dtype=torch.float16, sizes=sizes)
    )
    inputs = inputs.replace({"g": 0.01 * inputs.sequences["g"]})
    exact = gradients(inputs.map(torch.Tensor.double), backend="torch")
    for name, value in gradients(inputs, backend="triton").items():
        assert error(value, exact[name]) <= 3e-3, name
    assert set(delta_segments) == {3}


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("span", "reverse"), [(0, "second_half"), (2, False)])
def test_gradients_after_wide_walks_multiply_all_value_columns_at_once(interpreted, monkeypatch, span, reverse, narrow):
    from longseq.kernels.delta_rule import triton_delta

    launches = triton_delta.LAUNCHES[2, 128]
    if narrow:  # as a file of launches may have it: then the value columns of a chunk have two units
        monkeypatch.setitem(launches, "retreat_wide", launches["retreat_wide"]._replace(block=64))
    monkeypatch.setattr(triton_delta, "_find_span", lambda *sizes: span)
    monkeypatch.setitem(triton_delta.PROGRAMS, (2, 128), 1)
    steps = []

    class Noted(triton_delta.Prepared):
        def __init__(self, kernel, *rest, **constants):
            super().__init__(kernel, *rest, **constants)
            if kernel is triton_delta.differentiate_inputs:
                steps.append(constants["STEP"])

    monkeypatch.setattr(triton_delta, "Prepared", Noted)
    inputs = make_inputs("delta_rule", "plain", tokens=270, dtype=torch.float16, sizes={"H": 1, "K": 40, "V": 100})
    value = inputs.sequences["v"]
    inputs = lasting(inputs.replace({"v": value * torch.where(torch.arange(100) < 50, 64, 1).half()}))
    run = Inputs.run_both_ways if reverse else Inputs.run
    for cache in (triton_delta._prepare_forward, triton_delta._prepare_backward):
        cache.cache_clear()
    try:
        actual = gradients(inputs, backend="triton", reverse=reverse)
    finally:
        for cache in (triton_delta._prepare_forward, triton_delta._prepare_backward):
            cache.cache_clear()
    assert steps == [64 if narrow else 128]
    for name, exact in gradients(inputs.map(torch.Tensor.double), run=run, backend="torch").items():
        assert error(actual[name], exact) <= 1e-3, name
        if exact.shape == value.shape:
            assert error(actual[name][..., 50:], exact[..., 50:]) <= 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["differentiate_scores", "differentiate_gated"])
def test_only_a_fused_launch_multiplies_all_value_columns_at_once(interpreted, monkeypatch, kernel):
    from longseq.kernels.delta_rule import triton_delta

    launches = triton_delta.LAUNCHES[2, 128]
    monkeypatch.setitem(
        launches, kernel, launches[kernel]._replace(step=128)
    )  # their results have a unit for each tile
    monkeypatch.setitem(triton_delta.PROGRAMS, (2, 128), 1)
    inputs = make_inputs("delta_rule", "gated", batch=1, tokens=70, dtype=torch.float16, sizes={"H": 2, "V": 100})
    with pytest.raises(AssertionError, match=r"one tile at a time$"):
        gradients(inputs, backend="triton")


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


def test_delta_rule_walks_without_gradients_where_sequences_and_heads_fill_a_gpu():
    from longseq.kernels.delta_rule.triton_delta import _plan

    def is_walked(batch, tokens, heads, width=64, *bounds, half=True, differentiable=False):
        x = torch.empty((batch, tokens, heads, width), device="meta")
        return _plan(x, x, torch.tensor(bounds) if bounds else None, half, differentiable).walked

    assert all(is_walked(*sizes) for sizes in ((128, 197, 6), (8, 4096, 32), (1, 64, 2), (12, 100, 16)))
    assert not any(is_walked(*sizes) for sizes in ((1, 197, 6), (1, 65, 190), (8, 1024, 16), (128, 197, 6, 80)))
    assert not is_walked(128, 197, 6, half=False)
    assert not is_walked(128, 197, 6, differentiable=True)
    # One of several packed sequences may have nearly all tokens.
    assert is_walked(1, 1024, 64, 64, 0, 100, 1023, 1024)
    assert not is_walked(1, 1025, 64, 64, 0, 100, 1023, 1025)


def test_delta_rule_is_cut_where_a_gpu_would_be_idle():
    from longseq.kernels.delta_rule.triton_delta import _plan

    def plan(batch, tokens, heads, width, *bounds, half=True):
        x = torch.empty((batch, tokens, heads, width), device="meta")
        return _plan(x, x, torch.tensor(bounds) if bounds else None, half, True)

    def segments(*sizes, **options):
        found = plan(*sizes, **options)
        assert found.walks * found.span * found.chunk >= sizes[0] * sizes[1] or not found.span
        return found.walks if found.span else 0

    assert segments(1, 16384, 16, 128) == segments(1, 65536, 16, 128) == segments(1, 2048, 4, 128) == 8
    assert segments(1, 65536, 4, 128) == 32
    assert segments(2, 4096, 2, 128) == 2 * segments(1, 4096, 2, 128) == 32
    # Shorter ones where each of their programs still has a multiprocessor for itself.
    assert segments(1, 4096, 4, 128) == segments(1, 8192, 4, 128) == segments(1, 4096, 8, 64) == 16
    assert segments(1, 4096, 8, 128) == segments(1, 4096, 16, 64) == segments(1, 4096, 2, 128, half=False) == 8
    assert segments(8, 2048, 16, 128) == segments(1, 16384, 64, 128) == segments(1, 1024, 4, 128) == 0
    assert segments(1, 16384, 16, 128, 0, 100, 16384) == 8 + 3
    assert segments(1, 16384, 16, 128, *range(0, 16385, 1024)) == 0
    assert segments(1, 16384, 4, 256, half=False) == 0
    # Wide blocks of columns, where the programs of narrow ones would not all run at the same time.
    assert plan(8, 2048, 16, 128).advance == plan(1, 16384, 16, 128).advance == "advance_wide"
    assert (
        plan(1, 2048, 4, 128).advance == plan(1, 16384, 64, 128).advance == plan(8, 2048, 8, 128).advance == "advance"
    )


@pytest.mark.slow
def test_compiled_graph_takes_delta_rules_in_any_number_of_segments(interpreted, monkeypatch):
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "SHORTEST_SEGMENT", 1)
    monkeypatch.setattr(triton_delta, "FEWEST_SEGMENTS", 2)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda inputs: inputs.run(backend="triton"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (20, 150, 200):
        inputs = make_inputs("delta_rule", tokens=tokens, batch=1, dtype=torch.float32, sizes={"H": 1})
        inputs = inputs.map(lambda x: x.requires_grad_())
        torch.testing.assert_close(compiled(inputs), inputs.run(backend="triton"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_delta_rule_takes_half_precision_values_beside_float32_keys(interpreted, dtype):
    inputs = make_inputs("delta_rule", "gated_write_key", tokens=40, dtype=torch.float32)
    inputs = inputs.replace({"v": inputs.arguments["v"].to(dtype)})
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    actual = gradients(inputs, backend="triton")
    assert actual["output"].dtype == actual["gradient of v"].dtype == dtype
    assert actual["gradient of q"].dtype == actual["gradient of k"].dtype == torch.float32
    for name, value in exact.items():
        # The gradient of the output has its dtype, and enters all others.
        assert error(actual[name], value) <= 2e-3 + torch.finfo(dtype).eps, name


@pytest.mark.slow
@pytest.mark.parametrize("op", ["linear_attention", "slot_attention"])
def test_half_precision_values_beside_float32_keys(interpreted, op):
    for variant in list_variants(op)[:4]:
        inputs = make_inputs(op, variant, tokens=40, dtype=torch.float32)  # more than a chunk of float32
        inputs = inputs.replace({"v": inputs.arguments["v"].half()})
        exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
        actual = gradients(inputs, backend="triton")
        assert actual["output"].dtype == actual["gradient of v"].dtype == torch.float16
        assert actual["gradient of q"].dtype == actual["gradient of k"].dtype == torch.float32
        for name, value in exact.items():
            assert error(actual[name], value) <= 3e-3, (variant, name)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "gated_write_key"])
def test_delta_rule_recomputes_what_it_did_not_keep(interpreted, variant):
    inputs = make_inputs("delta_rule", variant, tokens=70, batch=1, dtype=torch.float16)
    expected = gradients(inputs, backend="triton")
    actual = gradients(inputs, backend="triton", recompute=True)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())

    def kept(recompute):
        tensors = {}
        leaves = inputs.map(lambda x: x.detach().requires_grad_())
        with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.setdefault(x.data_ptr(), x), lambda x: x):
            leaves.run(backend="triton", recompute=recompute)
        own = {x.data_ptr() for x in leaves.tensors.values()}
        return sum(x.numel() for place, x in tensors.items() if place not in own)

    assert kept(True) == 0 < kept(False)


# Gates per channel up to 1 are mild; those up to 3 need pairs of blocks of 2 tokens, those up to 30 of 1.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "strength"),
    [("plain", 0.0), ("extreme_head_decay", 1.0)]
    + [(variant, strength) for variant in ("channel_gated", "value_gated") for strength in (1.0, 3.0, 30.0)],
)
def test_linear_attention_over_several_chunks(interpreted, variant, strength):
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has two chunks
    inputs = make_inputs("linear_attention", variant, tokens=70, segments=4, dtype=torch.float16)
    gates = {name: strength * x for name, x in inputs.sequences.items() if name.startswith("g")}
    inputs = inputs.replace(gates)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds)
    for name, value in exact.items():
        assert error(actual[name], value) <= 2e-3, name


@pytest.mark.parametrize("variant", ["extreme_head_decay", "extreme_channel_decay", "extreme_value_decay"])
def test_linear_attention_over_several_float32_chunks(interpreted, variant):
    exact = gradients(make_inputs("linear_attention", variant, batch=1, tokens=70), backend="reference")
    inputs = make_inputs("linear_attention", variant, batch=1, tokens=70, dtype=torch.float32)
    assert_as_accurate_as_torch(inputs, exact)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["channel_gated", "value_gated"])
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_linear_attention_in_half_precision_takes_values_and_gradients_of_any_size(interpreted, variant, factor):
    inputs = make_inputs("linear_attention", variant, batch=1, tokens=20, dtype=torch.bfloat16)
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


@pytest.mark.slow
def test_slot_attention_over_several_chunks(interpreted):
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has two chunks
    inputs = make_inputs("slot_attention", "write", tokens=70, segments=4, dtype=torch.float16)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds)
    for name, value in exact.items():
        assert error(actual[name], value) <= 2e-3, name


LEAST_SQUARES_OPS = ["recursive_least_squares", "variational_linear_attention"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("op", LEAST_SQUARES_OPS)
def test_least_squares_over_several_chunks(interpreted, op, dtype):
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has three chunks
    inputs = make_inputs(op, tokens=70, segments=4, dtype=dtype, sizes={"H": 1})
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds)
    for name, value in exact.items():
        # Rounding, where the interpreter truncates bfloat16, and the delta rule's float16 products.
        assert error(actual[name], value) <= 2e-3 + torch.finfo(dtype).eps, name


@pytest.fixture
def refused(monkeypatch):
    """Segments of time for few tokens; records for each call whether one program had to compute all of them."""
    from longseq.kernels.recursive_least_squares import triton_least_squares as kernels

    monkeypatch.setattr(kernels, "FEWEST_SEGMENTS", 2)
    calls = []
    solve = kernels.solve

    class Watched:
        arg_names = solve.arg_names

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                solve[grid](*args, **kwargs)
                calls.append(bool(args[2][:, :, 1:].any()))

            return launch

    monkeypatch.setattr(kernels, "solve", Watched())
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "reverse"), [("plain", False), ("extreme_directions", False), ("plain", "second_half")]
)
def test_least_squares_in_segments_of_time(interpreted, refused, variant, reverse):
    shape = {"batch": 2 if reverse else 1, "tokens": 300, "sizes": {"H": 1}}
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
def test_least_squares_in_segments_of_time_from_no_state(interpreted, refused):
    inputs = make_inputs("recursive_least_squares", batch=1, tokens=300, dtype=torch.float16, sizes={"H": 1, "K": 3})
    x, u = inputs.sequences["x"], inputs.sequences["u"]
    exact, _ = recursive_least_squares(x.double(), u.double(), backend="torch")
    actual, _ = recursive_least_squares(x.float(), u, backend="triton")
    assert refused == [False]
    assert error(actual, exact) <= 2e-5


@pytest.mark.slow
def test_variational_linear_attention_has_the_precision_of_its_values(interpreted):
    inputs = make_inputs("variational_linear_attention", batch=1, tokens=70, dtype=torch.float32, sizes={"H": 1})
    inputs = inputs.replace({"v": inputs.arguments["v"].bfloat16()})
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference")
    actual = gradients(inputs, backend="triton")
    assert actual["output"].dtype == torch.bfloat16
    for name, value in exact.items():
        assert error(actual[name], value) <= (8e-3 if actual[name].dtype == torch.bfloat16 else 3e-3), name


@pytest.mark.parametrize("op", LEAST_SQUARES_OPS)
@pytest.mark.slow
def test_least_squares_of_what_is_not_a_number(interpreted, op):
    inputs = make_inputs(op, tokens=9, dtype=torch.bfloat16)
    inputs.sequences["u"][0, 5, 0, 0] = torch.nan
    o, _ = inputs.run(backend="triton")
    assert o[0, 5:, 0].isnan().all()
    assert o[1].isfinite().all()
    assert o[0, :, 1].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("op", LEAST_SQUARES_OPS)
def test_least_squares_pass_over_padding_in_reverse(interpreted, op):
    inputs = make_inputs(op, tokens=20, dtype=torch.float32)
    mask = torch.rand((2, 20), generator=torch.Generator().manual_seed(0)) < 0.7
    expected = inputs.run_reversed(backend="reference", mask=mask.flip(1))
    actual = inputs.run(backend="triton", mask=mask, reverse=True)
    for name, value in results(expected[0][mask], expected[1]).items():
        torch.testing.assert_close(results(actual[0][mask], actual[1])[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_delta_rule_in_half_precision_takes_values_and_gradients_of_any_size(interpreted, factor):
    inputs = make_inputs("delta_rule", tokens=20, dtype=torch.bfloat16)
    large = inputs.replace({name: inputs.arguments[name] * factor for name in ("v", "initial_state")})
    expected, actual = inputs.run(backend="triton"), large.run(backend="triton")
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double() / factor, theirs.double(), rtol=2e-2, atol=1e-2)

    def query_gradient(weight):
        q = inputs.arguments["q"].detach().requires_grad_()
        o, _ = inputs.replace({"q": q}).run(backend="triton")
        return torch.autograd.grad(o, q, torch.full_like(o, weight))[0].double() / weight

    torch.testing.assert_close(query_gradient(factor), query_gradient(1.0), rtol=2e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_a_loss_on_the_output_alone(interpreted, op):
    def output_gradients(backend, dtype):
        inputs = make_inputs(op, list_variants(op)[0], tokens=6, dtype=dtype).map(lambda x: x.requires_grad_())
        o, _ = inputs.run(backend=backend)
        return torch.autograd.grad(o.square().sum(), list(inputs.tensors.values()), materialize_grads=True)

    for ours, exact in zip(
        output_gradients("triton", torch.float32), output_gradients("reference", torch.float64), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_strided_inputs_need_no_copy(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=7, dtype=torch.float32)
    strided = inputs.map(lambda x: torch.stack((x, x), dim=-2).unbind(-2)[1] if x.ndim >= 3 else x)
    assert not any(x.is_contiguous() for x in strided.tensors.values() if x.ndim >= 3)
    expected, actual = results(*inputs.run(backend="triton")), results(*strided.run(backend="triton"))
    for name, theirs in expected.items():
        assert torch.equal(actual[name], theirs), name


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_compiled_graph_holds_the_kernel_whole(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=5, dtype=torch.float32)
    expected = gradients(inputs, backend="triton")
    torch._dynamo.reset()
    compiled = torch.compile(inputs.run, fullgraph=True, backend="aot_eager")
    actual = results(*compiled(backend="triton"))
    torch.testing.assert_close(actual, {name: expected[name] for name in actual})


def test_convolution_passes_over_padding(interpreted):
    inputs = make_inputs("short_convolution", "silu", batch=3, tokens=6, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    expected, actual = inputs.run(backend="reference", mask=mask), inputs.run(backend="triton", mask=mask)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list_variants("short_convolution"))
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no_state"])
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
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("op", ["longhorn_scan", "selective_scan"])
def test_diagonal_scans_in_parts_of_time(interpreted, monkeypatch, op, reverse):
    from longseq.kernels.diagonal_scan import triton_scan as kernels

    monkeypatch.setattr(kernels, "SHORTEST_PART", kernels.CHECKPOINT)
    monkeypatch.setattr(kernels, "FEWEST_PARTS", 1)
    split = []
    sequence_of_slots = kernels.sequence_of_slots
    monkeypatch.setattr(kernels, "sequence_of_slots", lambda *args: split.append(args) or sequence_of_slots(*args))
    for options in ({"cu_seqlens": torch.tensor([0, 3, 3, 50])}, {}):
        inputs = make_inputs(op, batch=1, segments=3 if options else None, tokens=50, sizes={"N": 20})
        exact = gradients(inputs, run=Inputs.run_reversed if reverse else Inputs.run, backend="reference", **options)
        inputs = make_inputs(
            op, batch=1, segments=3 if options else None, tokens=50, sizes={"N": 20}, dtype=torch.float32
        )
        assert_as_accurate_as_torch(inputs, exact, reverse=reverse, **options)
    assert len(split) == 4  # forward and backward


@pytest.mark.slow
def test_diagonal_scans_in_parts_of_time_read_half_of_the_rows_in_reverse(interpreted, monkeypatch):
    from longseq.kernels.diagonal_scan import triton_scan as kernels

    monkeypatch.setattr(kernels, "SHORTEST_PART", kernels.CHECKPOINT)
    monkeypatch.setattr(kernels, "FEWEST_PARTS", 1)
    for op in ("longhorn_scan", "selective_scan"):
        inputs = make_inputs(op, tokens=34, sizes={"N": 20}).with_own_parameters()
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
def test_launches_of_the_scans_by_the_number_of_warps():
    from longseq.kernels.diagonal_scan.triton_scan import WARPS, _plan

    def name(warps, longhorn):
        x, key = torch.empty((warps, 20, 32), device="meta"), torch.empty((warps, 20, 16), device="meta")
        return _plan(x, key, None if longhorn else torch.empty((32, 16), device="meta"), None, 0).name("forward", 32)

    half = WARPS // 2
    names = {warps: name(warps, True) for warps in (WARPS, WARPS + 1, 3 * half, 3 * half + 1, 2 * WARPS, 4 * WARPS)}
    ends = ["", *["_crowded"] * 2, *["_doubled"] * 3]
    assert list(names.values()) == [f"forward{end}" for end in ends]
    # With half as many warps of twice as many channels, one round is enough in place of two, and two in place of three.
    numbers = (2 * WARPS + 1, 3 * WARPS, 4 * WARPS + 1, 12 * WARPS)
    assert {name(warps, True) for warps in numbers} == {"forward_queued"}
    assert name(3 * WARPS + 1, True) == "forward_doubled"
    ends = ["", *["_crowded"] * 2, *["_doubled"] * 2, *["_crowded"] * 2]
    numbers = (WARPS, WARPS + 1, 3 * half, 3 * half + 1, 2 * WARPS, 2 * WARPS + 1, 4 * WARPS)
    assert [name(warps, False) for warps in numbers] == [f"forward_selective{end}" for end in ends]


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True, "second_half", "own"])
def test_convolution_of_many_taps_over_several_stretches(interpreted, reverse):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 170, 3), "weight": (3, 9), "bias": (3,), "initial_state": (2, 3, 8)}
    if reverse == "own":  # weights for each direction
        shapes |= {"weight": (2, 3, 9), "bias": (2, 3), "initial_state": (4, 3, 8)}
        reverse = "second_half"
    exact = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    gradient = {}
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in exact.items()}
        y, _ = short_convolution(**leaves, activation="silu", reverse=reverse, backend=backend)
        gradient[backend] = [y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))]
    for ours, expected in zip(gradient["triton"], gradient["torch"], strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", TRITON_OPS)
def test_any_float64_input_is_a_reason_against_float32_kernels(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=4, dtype=torch.float32)
    for name in inputs.sequences.keys() | {name for name in inputs.tensors if name.startswith("initial_state")}:
        with pytest.raises(ValueError, match="the inputs are float64"):
            inputs.replace({name: inputs.arguments[name].double()}).run(backend="triton")


@pytest.mark.parametrize("op", TRITON_OPS)
def test_reasons_name_the_remedy(op):
    reasons = explain(op, device="cpu", dtype=torch.float64, exporting=True)["triton"]
    assert len(reasons) == (2 if torch.cuda.is_available() else 3)
    assert any("float64" in reason and "backend='torch'" in reason for reason in reasons)
    assert explain(op, device="cuda")["triton"] == []


def test_delta_rules_too_wide_for_the_table_are_refused():
    reasons = explain("delta_rule", device="cuda", sizes={"K": 257, "V": 300})["triton"]
    assert reasons == ["K = 257 and V = 300, and it goes to 256 (use backend='torch')"]
    assert explain("delta_rule", device="cuda", sizes={"K": 256, "V": 256})["triton"] == []


@pytest.mark.parametrize("op", LEAST_SQUARES_OPS)
def test_inverses_too_wide_for_registers_are_refused(op):
    assert explain(op, device="cuda", sizes={"K": 65})["triton"] == ["K = 65, and it goes to 64 (use backend='torch')"]
    assert explain(op, device="cuda", sizes={"K": 64, "V": 256})["triton"] == []


@pytest.mark.parametrize("op", ["linear_attention", "slot_attention"])
def test_states_of_linear_attention_too_wide_for_the_table_are_refused(op):
    reasons = explain(op, device="cuda", sizes={"K": 513, "V": 600})["triton"]
    assert reasons == ["K = 513 and V = 600, and it goes to 512 (use backend='torch')"]
    assert explain(op, device="cuda", sizes={"K": 512, "V": 512, "M": 512})["triton"] == []


def test_states_too_wide_for_registers_are_refused():
    x, narrow, wide = torch.zeros(1, 2, 3), torch.zeros(1, 2, 64), torch.zeros(1, 2, 65)
    sizes = {"N": wide.shape[-1]}
    reasons = explain("longhorn_scan", device="cuda", sizes=sizes)["triton"]
    assert reasons == ["N = 65, and it goes to 64 (use backend='torch')"]
    sizes = {"N": narrow.shape[-1]}
    assert explain("longhorn_scan", device="cuda", sizes=sizes)["triton"] == []
    with pytest.raises(ValueError, match="N = 65, and it goes to 64"):
        longhorn_scan(x, wide, wide, x, backend="triton")


GPU_SHAPES = [
    # (op, batch, tokens, channels, entries)
    ("longhorn_scan", 2, 197, 384, 16),
    ("longhorn_scan", 1, 4097, 96, 64),
    ("longhorn_scan", 3, 500, 100, 5),
    ("selective_scan", 2, 197, 384, 16),
    ("selective_scan", 1, 4097, 96, 64),
    ("selective_scan", 3, 500, 100, 5),
    ("short_convolution", 2, 197, 1152, 4),
    ("short_convolution", 3, 1000, 100, 3),
    # channels of the queries are heads times entries, and a head has as many keys as values
    ("convolved_features", 2, 197, 384, 64),
    ("convolved_features", 3, 1000, 100, 50),
    ("convolved_features", 1, 4097, 1024, 256),
    # channels are heads times entries, and a head has as many keys as values
    ("delta_rule", 2, 197, 384, 64),
    ("delta_rule", 1, 4097, 256, 64),
    ("delta_rule", 1, 16384, 256, 128),
    ("delta_rule", 2, 1000, 512, 256),
    ("delta_rule", 3, 500, 100, 50),
    # so many sequences and heads that nothing is cut into segments of time
    ("delta_rule", 128, 197, 384, 64),
    ("delta_rule", 8, 2048, 2048, 64),
    ("delta_rule", 8, 2048, 2048, 128),
    ("delta_rule", 8, 2048, 2048, 256),
    ("longhorn_scan", 40, 530, 1024, 16),
    ("selective_scan", 40, 530, 1024, 16),
    ("linear_attention", 8, 2048, 2048, 128),
    ("slot_attention", 8, 2048, 2048, 512),
    ("variational_linear_attention", 8, 2048, 1024, 64),
    ("linear_attention", 2, 197, 384, 64),
    ("linear_attention", 1, 16384, 256, 128),
    ("linear_attention", 2, 1000, 512, 256),
    ("linear_attention", 3, 500, 100, 50),
    # 16 slots
    ("slot_attention", 2, 197, 384, 64),
    ("slot_attention", 1, 4097, 1024, 512),
    ("slot_attention", 3, 500, 100, 50),
    ("orthogonal_recurrence", 2, 197, 384, 64),
    ("orthogonal_recurrence", 1, 500, 256, 128),
    ("orthogonal_recurrence", 3, 100, 100, 50),
    ("recursive_least_squares", 2, 197, 384, 64),
    ("recursive_least_squares", 1, 16384, 128, 64),
    ("recursive_least_squares", 3, 500, 100, 50),
    ("variational_linear_attention", 2, 197, 384, 64),
    ("variational_linear_attention", 1, 16384, 128, 64),
    ("variational_linear_attention", 3, 500, 100, 50),
]
# (batch, tokens, heads, K, V, with a write key, with gates, segments)
DELTA_SHAPES = [
    (2, 300, 3, 64, 32, True, True, None),
    (2, 1500, 2, 128, 64, True, True, None),
    (1, 2000, 2, 128, 128, False, True, (0, 3, 3, 700, 1999, 2000)),
    (1, 700, 2, 64, 64, True, False, (0, 64, 65, 700)),
    (1, 1100, 2, 256, 128, True, False, None),
    (1, 1100, 2, 96, 256, False, True, None),
    (8, 2048, 16, 128, 128, False, True, None),
    # In segments of time, those of half precision.
    (1, 16384, 16, 128, 128, False, False, None),
    (1, 65536, 4, 128, 128, True, True, None),
    (1, 4096, 4, 128, 128, False, False, None),
    (1, 4096, 8, 64, 64, True, False, None),
    (1, 16384, 8, 256, 256, False, True, (0, 100, 12100, 12228, 16384)),
]
# (batch, tokens, heads, D, M, objective, normalize, with gates, with a threshold, chunk_size, segments)
ORTHOGONAL_SHAPES = [
    (2, 300, 3, 64, 64, "decode", True, True, True, 1, None),
    (2, 300, 3, 64, 32, "encode", False, True, False, 1, None),
    (1, 400, 2, 16, 16, "similarity", True, True, True, 1, (0, 3, 3, 150, 399, 400)),
    (70, 70, 6, 32, 64, "ttt", False, True, True, 1, None),
    (2, 300, 3, 128, 128, "decode", False, True, True, 1, None),
    (2, 300, 3, 64, 64, "decode", True, True, False, 64, None),
    (2, 300, 3, 64, 64, "encode", True, False, False, 16, None),
    (1, 400, 2, 128, 128, "decode", False, True, False, 32, (0, 3, 3, 150, 399, 400)),
    (1, 400, 2, 128, 128, "similarity", True, True, False, 64, (0, 64, 65, 400)),
    (2, 300, 3, 100, 50, "ttt", False, True, False, 16, None),
    (2, 100, 3, 32, 32, "decode", True, True, False, 5, None),
    (1, 2100, 2, 64, 64, "decode", True, True, False, 16, None),
    (2, 300, 3, 128, 128, "ttt", False, True, False, 16, None),
    (2, 300, 3, 128, 128, "ttt", False, True, False, 64, None),
]
# and how they are read
ORTHOGONAL_REVERSED = [
    (2, 300, 3, 64, 64, "decode", True, True, True, 1, None, True),
    (4, 300, 3, 64, 64, "decode", True, True, True, 1, None, "second_half"),
    (4, 100, 3, 100, 50, "ttt", False, True, True, 1, None, "second_half"),
    # more heads than the programs of the backward pass, whose scratch memory is for about 480
    (200, 40, 6, 64, 64, "decode", True, True, False, 1, None, "second_half"),
    (1, 400, 2, 16, 16, "similarity", True, True, True, 1, (0, 3, 3, 150, 399, 400), True),
    (2, 300, 3, 64, 64, "decode", True, True, False, 16, None, True),
    (2, 300, 3, 64, 64, "decode", True, True, False, 16, None, "second_half"),
    (2, 300, 3, 64, 64, "encode", True, True, False, 16, None, "second_half"),
    (2, 300, 3, 64, 64, "decode", True, True, False, 64, None, True),
    (4, 300, 3, 64, 64, "decode", True, True, False, 64, None, "second_half"),
    (2, 300, 3, 128, 128, "ttt", False, True, False, 64, None, "second_half"),
    (1, 400, 2, 64, 64, "encode", True, True, False, 16, (0, 64, 65, 400), True),
    (1, 400, 2, 128, 128, "decode", False, True, False, 32, (0, 3, 3, 150, 399, 400), True),
    (1, 400, 2, 128, 128, "similarity", True, True, False, 64, (0, 64, 65, 400), True),
]
# (batch, tokens, heads, K, V, gate, its largest size, segments)
LINEAR_SHAPES = [
    (2, 300, 3, 64, 32, None, 0.0, None),
    (2, 1100, 2, 512, 512, None, 0.0, None),
    (2, 300, 3, 128, 64, "head", 0.1, None),
    (1, 2000, 2, 64, 64, "head", 30.0, (0, 3, 3, 700, 1999, 2000)),
    (2, 300, 3, 128, 128, "key", 0.1, None),
    (2, 300, 3, 128, 128, "key", 3.0, None),
    (1, 2000, 2, 64, 512, "key", 0.2, (0, 3, 3, 700, 1999, 2000)),
    (1, 700, 2, 96, 40, "key", 1e4, (0, 64, 65, 700)),
    (2, 300, 3, 128, 128, "value", 0.1, None),
    (2, 300, 3, 128, 128, "value", 3.0, None),
    (1, 2000, 2, 512, 64, "value", 0.2, (0, 3, 3, 700, 1999, 2000)),
    (1, 700, 2, 40, 96, "value", 1e4, (0, 64, 65, 700)),
]
# (batch, tokens, heads, K, V, slots, the largest gate, activation, with write strengths, segments)
SLOT_SHAPES = [
    (2, 300, 3, 64, 64, 64, 0.1, "softmax", False, None),
    (1, 2000, 2, 512, 512, 64, 0.1, "softmax", False, (0, 3, 3, 700, 1999, 2000)),
    (1, 700, 2, 96, 40, 100, 3.0, "softmax", True, None),
    (1, 700, 2, 64, 128, 32, 0.1, "relu_squared", False, (0, 64, 65, 700)),
]
# (batch, tokens, heads, K, refresh period, size of one in fifty directions, segments)
INVERSE_SHAPES = [
    (2, 300, 3, 64, 20, 1.0, None),
    (1, 5000, 2, 64, 20, 1.0, None),
    (1, 5000, 2, 64, None, 1.0, None),
    (1, 5000, 2, 16, 7, 300.0, None),
    (1, 2000, 2, 32, 20, 1.0, (0, 3, 3, 700, 1999, 2000)),
    (1, 700, 2, 50, 7, 30.0, (0, 64, 65, 700)),
]
# (batch, tokens, heads, K, V, segments)
VARIATIONAL_SHAPES = [
    (2, 300, 3, 64, 64, None),
    (1, 5000, 2, 64, 128, None),
    (1, 2000, 2, 32, 40, (0, 3, 3, 700, 1999, 2000)),
]


def gpu_arguments(op, batch, tokens, channels, entries, dtype):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    if op == "delta_rule":
        return delta_rule, delta_arguments(normal, batch, tokens, channels // entries, entries, entries)
    if op == "orthogonal_recurrence":
        arguments = orthogonal_arguments(normal, batch, tokens, channels // entries, entries, entries)
        return orthogonal_recurrence, arguments | {
            "initial_state": normal(batch, channels // entries, entries, entries)
        }
    if op in ("linear_attention", "slot_attention"):
        heads, slots = channels // entries, 16
        arguments = {name: normal(batch, tokens, heads, entries) for name in ("q", "k", "v")}
        gate = normal(batch, tokens, heads, entries if op == "linear_attention" else slots)
        arguments["g"] = torch.nn.functional.logsigmoid(gate) / 16
        return linear_attention if op == "linear_attention" else slot_attention, arguments
    if op == "recursive_least_squares":
        shape = (batch, tokens, channels // entries, entries)
        return recursive_least_squares, {"x": normal(*shape), "u": normal(*shape) / entries**0.5}
    if op == "variational_linear_attention":
        arguments = variational_arguments(normal, batch, tokens, channels // entries, entries, entries)
        return variational_linear_attention, arguments
    if op == "convolved_features":
        heads, channels = channels // entries, 3 * channels

        def features(**arguments):
            return convolved_features(**arguments, num_heads=heads, key_dim=entries)

        return features, {"x": normal(batch, tokens, channels + heads + 3), "weight": normal(channels, 4)}
    x = normal(batch, tokens, channels)
    if op == "short_convolution":
        return short_convolution, {"x": x, "weight": normal(channels, entries), "bias": normal(channels)}
    rate = normal(batch, tokens, channels).sigmoid()
    key, query = normal(batch, tokens, entries), normal(batch, tokens, entries)
    if op == "longhorn_scan":
        return longhorn_scan, {"x": x, "q": query, "k": key, "beta": rate}
    A = -normal(channels, entries).float().exp()
    return selective_scan, {"x": x, "delta": rate, "A": A, "B": key, "C": query}


def delta_arguments(normal, batch, tokens, heads, key_dim, value_dim):
    def unit(*shape):
        x = normal(*shape)
        return torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)

    q, k = (unit(batch, tokens, heads, key_dim) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": normal(batch, tokens, heads, value_dim),
        "beta": normal(batch, tokens, heads).sigmoid(),
    }


def orthogonal_arguments(normal, batch, tokens, heads, width, slots):
    # Unit vectors: longer ones turn the slots so far that the torch form's own errors grow from token to token.
    q, k, v = (torch.nn.functional.normalize(normal(batch, tokens, heads, n), dim=-1) for n in (slots, slots, width))
    return {"q": q, "k": k, "v": v, "gamma": normal(batch, tokens, heads).sigmoid()}


def variational_arguments(normal, batch, tokens, heads, key_dim, value_dim):
    keys = (batch, tokens, heads, key_dim)
    q, k = (torch.nn.functional.elu(normal(*keys)) + 1 for _ in range(2))
    u = torch.nn.functional.normalize(normal(*keys), dim=-1) / key_dim**0.5
    return {"q": q, "k": k, "v": normal(batch, tokens, heads, value_dim), "u": u}


def inverse_state(normal, rows, heads, width):
    """A positive definite matrix for each row."""
    root = normal(rows, heads, width, width).float()
    eye = torch.eye(width, device=root.device)
    return (root @ root.mT / width + 0.5 * eye).to(normal().dtype)


def gpu_gradients(function, arguments, backend, **options):
    leaves = {name: value.detach().requires_grad_() for name, value in arguments.items()}
    o, state = function(**leaves, **options, output_final_state=True, backend=backend)
    # Random signs: with regular weights, the two halves of a sum over time would cancel, and leave only rounding.
    generator = torch.Generator(o.device).manual_seed(1)
    weights = torch.randn(o.shape, device=o.device, dtype=torch.float64, generator=generator).to(o.dtype)
    returned = results(o, state)
    loss = (o * weights).sum() + sum(x.sum() for name, x in returned.items() if name != "output")
    return returned | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def slot_attention_from(keys, values, **arguments):
    """`slot_attention` with the parts of its initial state as two arguments."""
    return slot_attention(**arguments, initial_state=(keys, values))


def recursive_least_squares_from(A, **arguments):
    """`recursive_least_squares` from A, with counters at different places in the period of a refresh."""
    steps = 13 * torch.arange(A.shape[0], device=A.device)
    return recursive_least_squares(**arguments, initial_state=(A, steps))


def variational_linear_attention_from(S, A, z, **arguments):
    """`variational_linear_attention` with the parts of its initial state as separate arguments."""
    steps = 13 * torch.arange(A.shape[0], device=A.device)
    return variational_linear_attention(**arguments, initial_state=(S, A, z, steps))


VARIATIONAL = (variational_linear_attention, variational_linear_attention_from)
SLOTS = (slot_attention, slot_attention_from)
HALF_PRODUCTS = (delta_rule, linear_attention, *SLOTS, *VARIATIONAL)


def mean_error(actual, expected):
    """The mean difference relative to the mean magnitude: a few wrong entries hardly count."""
    return ((actual.double() - expected).abs().mean() / (expected.abs().mean() + 1e-30)).item()


def assert_accurate_in_every_run(function, arguments, dtype, *, error=error, **options):
    """Compare with float64: up to twice the torch form's own error, and the same result in every run."""
    exact = gpu_gradients(function, {name: value.double() for name, value in arguments.items()}, "torch", **options)
    plain = gpu_gradients(function, arguments, "torch", **options)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory is NaN until it is written
    try:
        runs = [gpu_gradients(function, arguments, "triton", **options) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    factor = 2
    if function in HALF_PRODUCTS and dtype != torch.float32:
        # Its products are float16, while the torch form computes in float32: a state may be as inaccurate as one
        # rounded to the inputs' type, and float16 inputs lose more than the rounding of results.
        plain = {name: value.to(dtype) if value.is_floating_point() else value for name, value in plain.items()}
        factor = 4 if dtype == torch.float16 else 2
        if dtype == torch.float16 and function in SLOTS:
            # Scores of up to 20 are exponentiated: a product's rounding becomes an error of the weight that grows with
            # the score. In Triton's interpreter, with exact sums, gradients are off by up to 5.6 times that of
            # rounding.
            factor = 8
        if dtype == torch.bfloat16 and function in VARIATIONAL:
            # The delta rule below it rounds what reaches the state to bfloat16 as well: on an H200 the largest error of
            # the gradient of S is 2.1 times that of rounding, and in Triton's interpreter that of u 2.4 times.
            factor = 3
    if error is mean_error:
        factor = 100  # one entry that is shrunk to zero only here changes everything that follows
    for name, value in exact.items():
        # Tensor cores truncate float32 sums: over thousands of tokens, the gradients of u and A are off by up to 5e-5
        # and 1.4e-4, those of the torch form by 2e-6; in Triton's interpreter, both forms are equally accurate.
        summed = function in VARIATIONAL and dtype == torch.float32
        of_name = {"u": 25, "A": 100}.get(name, factor) if summed else factor
        # The last term is the error of the hardware's exp and sigmoid, which matters in float32 only.
        allowed = of_name * error(plain[name], value) + 64 * torch.finfo(torch.float32).eps
        assert error(runs[0][name], value) <= allowed, name
        for run in runs[1:]:
            assert torch.equal(run[name], runs[0][name]), f"{name} differs from run to run"


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
    for gate in (-3.0, -8.0, -12.0, -18.0):
        strong = inputs.replace({name: torch.full_like(inputs.arguments[name], gate)})
        assert_gates_accurate(strong, name, dtype)
    for large in ("q", "v") if dtype != torch.float16 else ("v",):
        for reset in (False, True):
            assert_gates_accurate(with_large_end(inputs, name, large, reset, place=40), name, dtype, slice(40))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("op", "variant"), CASES)
def test_nan_reaches_what_depends_on_it_on_the_gpu(op, variant, dtype):
    inputs = make_inputs(op, variant, batch=2, tokens=100, dtype=dtype, device="cuda", sizes={"H": 1})
    assert_nan_reaches_what_depends_on_it(inputs, place=37)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_real_sizes_on_the_gpu(shape, dtype):
    assert_accurate_in_every_run(*gpu_arguments(*shape, dtype), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", DELTA_SHAPES, ids=lambda shape: "-".join(map(str, shape[1:5])))
def test_delta_rule_on_the_gpu(shape, dtype):
    batch, tokens, heads, key_dim, value_dim, own_write_key, gated, bounds = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    arguments = delta_arguments(normal, batch, tokens, heads, key_dim, value_dim)
    if own_write_key:
        noise = 0.3 * torch.nn.functional.normalize(normal(*arguments["k"].shape), dim=-1)
        arguments["write_key"] = torch.nn.functional.normalize(arguments["k"] + noise, dim=-1)
    if gated:
        arguments["g"] = -normal(batch, tokens, heads).exp() * 0.1
    segments = batch if bounds is None else len(bounds) - 1
    arguments["initial_state"] = normal(segments, heads, key_dim, value_dim)
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    assert_accurate_in_every_run(delta_rule, arguments, dtype, scale=0.5, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 3000, 3001, 4200)], ids=["one_sequence", "packed"])
def test_delta_rule_in_segments_of_time_on_the_gpu(monkeypatch, bounds, gated, width, dtype):
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "_find_span", lambda *sizes: 7 if width <= 128 or dtype != torch.float32 else 0)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    arguments = delta_arguments(normal, 1, 4200, 2, width, width)
    arguments["beta"] = 0.02 * arguments["beta"]  # so that the first token still affects the last segment
    if gated:
        arguments["g"] = -0.001 * normal(1, 4200, 2).exp()
    arguments["initial_state"] = normal(1 if bounds is None else len(bounds) - 1, 2, width, width)
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    for reverse in (False, True):
        assert_accurate_in_every_run(delta_rule, arguments, dtype, reverse=reverse, **options)
    if not gated:  # queries and write keys that the backward pass weighs again
        monkeypatch.setattr(triton_delta, "KEPT_ROWS", 0)
        assert_accurate_in_every_run(delta_rule, arguments, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 3000, 3001, 4200)], ids=["one_sequence", "packed"])
def test_queries_and_keys_that_are_weighed_again_are_the_same_on_the_gpu(monkeypatch, bounds, width):
    from longseq.kernels.delta_rule import triton_delta

    def differentiate(limit):
        monkeypatch.setattr(triton_delta, "KEPT_ROWS", limit)
        torch.manual_seed(0)
        arguments = delta_arguments(
            lambda *sizes: torch.randn(sizes, device="cuda", dtype=torch.bfloat16), 1, 4200, 4, width, width
        )
        leaves = {name: x.requires_grad_() for name, x in arguments.items()}
        options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
        o, _ = delta_rule(**leaves, backend="triton", **options)
        return [o, *torch.autograd.grad(o.square().sum(), list(leaves.values()))]

    for kept, weighed in zip(differentiate(1 << 25), differentiate(0), strict=True):
        assert torch.equal(kept, weighed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", ORTHOGONAL_SHAPES, ids=lambda shape: "-".join(map(str, shape[1:10])))
def test_orthogonal_recurrence_on_the_gpu(shape, dtype):
    assert_orthogonal_recurrence_is_accurate(shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", ORTHOGONAL_REVERSED, ids=lambda shape: "-".join(map(str, (*shape[:10], shape[11]))))
def test_orthogonal_recurrence_in_reverse_on_the_gpu(shape, dtype):
    *shape, reverse = shape
    assert_orthogonal_recurrence_is_accurate(shape, dtype, reverse=reverse)


def assert_orthogonal_recurrence_is_accurate(shape, dtype, **reading):
    batch, tokens, heads, width, slots, objective, normalize, gated, shrunk, chunk_size, bounds = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    arguments = orthogonal_arguments(normal, batch, tokens, heads, width, slots)
    if gated:
        arguments["g"] = -normal(batch, tokens, heads).exp() * 0.1
    if shrunk:
        arguments["threshold"] = normal(batch, tokens, heads).sigmoid() * 0.01
    segments = batch if bounds is None else len(bounds) - 1
    arguments["initial_state"] = normal(segments, heads, width, slots)
    options = {"objective": objective, "normalize": normalize, "chunk_size": chunk_size, "scale": 0.5, **reading}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, device="cuda")
    # A number within rounding of the threshold is shrunk to zero by one form, and passes a gradient in the other.
    measure = mean_error if shrunk else error
    assert_accurate_in_every_run(orthogonal_recurrence, arguments, dtype, error=measure, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=lambda shape: "-".join(map(str, shape[1:7])))
def test_linear_attention_on_the_gpu(shape, dtype):
    batch, tokens, heads, key_dim, value_dim, gate, largest, bounds = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    arguments = {
        name: normal(batch, tokens, heads, width)
        for name, width in {"q": key_dim, "k": key_dim, "v": value_dim}.items()
    }
    if gate is not None:
        width = {"head": (), "key": (key_dim,), "value": (value_dim,)}[gate]
        size = torch.rand((batch, tokens, heads, *width), device="cuda", generator=generator)
        arguments["g_value" if gate == "value" else "g"] = -largest * size
    segments = batch if bounds is None else len(bounds) - 1
    arguments["initial_state"] = normal(segments, heads, key_dim, value_dim)
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    assert_accurate_in_every_run(linear_attention, arguments, dtype, scale=0.5, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SLOT_SHAPES, ids=lambda shape: "-".join(map(str, shape[1:8])))
def test_slot_attention_on_the_gpu(shape, dtype):
    batch, tokens, heads, key_dim, value_dim, slots, largest, activation, own_write, bounds = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    arguments = {
        name: normal(batch, tokens, heads, width)
        for name, width in {"q": key_dim, "k": key_dim, "v": value_dim}.items()
    }
    arguments["g"] = -largest * torch.rand((batch, tokens, heads, slots), device="cuda", generator=generator)
    if own_write:
        arguments["write"] = normal(batch, tokens, heads, slots).sigmoid()
    segments = batch if bounds is None else len(bounds) - 1
    arguments["keys"] = normal(segments, heads, slots, key_dim)
    arguments["values"] = normal(segments, heads, slots, value_dim)
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    options |= {"scale": key_dim**-0.5, "activation": activation}
    assert_accurate_in_every_run(slot_attention_from, arguments, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", INVERSE_SHAPES, ids=lambda shape: "-".join(map(str, shape[1:6])))
def test_recursive_least_squares_on_the_gpu(shape, dtype):
    batch, tokens, heads, width, period, size, bounds = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    u = normal(batch, tokens, heads, width) / width**0.5
    u[:, ::50] *= size
    segments = batch if bounds is None else len(bounds) - 1
    arguments = {"x": normal(*u.shape), "u": u, "A": inverse_state(normal, segments, heads, width)}
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    options |= {"mask": torch.rand((batch, tokens), device="cuda", generator=generator) < 0.9}
    options |= {"refresh_period": period, "refresh": 0.01}
    assert_accurate_in_every_run(recursive_least_squares_from, arguments, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", VARIATIONAL_SHAPES, ids=lambda shape: "-".join(map(str, shape[1:5])))
def test_variational_linear_attention_on_the_gpu(shape, dtype):
    batch, tokens, heads, key_dim, value_dim, bounds = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    arguments = variational_arguments(normal, batch, tokens, heads, key_dim, value_dim)
    segments = batch if bounds is None else len(bounds) - 1
    arguments["S"] = normal(segments, heads, key_dim, value_dim)
    arguments["A"] = inverse_state(normal, segments, heads, key_dim)
    arguments["z"] = normal(segments, heads, key_dim).sigmoid()
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    assert_accurate_in_every_run(variational_linear_attention_from, arguments, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reading", ["reverse", "packed", "second_half"])
@pytest.mark.parametrize("op", LEAST_SQUARES_OPS)
def test_least_squares_from_a_state_backwards_on_the_gpu(op, reading, dtype):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    rows, heads, width = 1 if reading == "packed" else 2, 3, 64
    function, arguments = gpu_arguments(op, rows, 1300, heads * width, width, dtype)
    segments = 4 if reading == "packed" else rows
    arguments["A"] = inverse_state(normal, segments, heads, width)
    if op == "recursive_least_squares":
        function = recursive_least_squares_from
    else:
        function = variational_linear_attention_from
        arguments["S"], arguments["z"] = normal(segments, heads, width, width), normal(segments, heads, width).sigmoid()
    options = {"reverse": "second_half" if reading == "second_half" else True}
    if reading == "packed":
        options["cu_seqlens"] = torch.tensor([0, 500, 500, 501, 1300], device="cuda")
    else:
        options["mask"] = torch.rand((rows, 1300), device="cuda", generator=generator) < 0.9
    assert_accurate_in_every_run(function, arguments, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("op", "forward"), SCAN_LAUNCHES)
def test_diagonal_scans_of_more_warps_than_run_at_once_on_the_gpu(monkeypatch, op, forward, dtype):
    asked = launch_as(monkeypatch, forward)
    assert_accurate_in_every_run(*gpu_arguments(op, 2, 197, 384, 16, dtype), dtype)
    assert asked["forward"] >= 1 <= asked["backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [500, 1500])
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if takes(op, "reverse")])
def test_reading_in_reverse_on_the_gpu(op, tokens, dtype):
    entries = {"short_convolution": 4, "delta_rule": 64}.get(op, 16)
    assert_accurate_in_every_run(*gpu_arguments(op, 2, tokens, 128, entries, dtype), dtype, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [197, 1501])
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if takes(op, "reverse")])
def test_reading_half_of_the_rows_in_reverse_on_the_gpu(op, tokens, dtype):
    entries = {"short_convolution": 4, "delta_rule": 64}.get(op, 16)
    function, arguments = gpu_arguments(op, 6, tokens, 128, entries, dtype)
    assert_accurate_in_every_run(function, arguments, dtype, reverse="second_half")
    own = {name: torch.stack((x, 0.5 * x)) for name, x in arguments.items() if name in ("A", "weight", "bias")}
    if own:
        assert_accurate_in_every_run(function, arguments | own, dtype, reverse="second_half")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [500, 1500])
@pytest.mark.parametrize("op", ["delta_rule", "linear_attention", "slot_attention"])
def test_half_precision_values_beside_float32_keys_on_the_gpu(op, tokens):
    function, arguments = gpu_arguments(op, 2, tokens, 128, 64, torch.bfloat16)
    wide = {name: arguments[name].float() for name in ("q", "k")}
    assert_accurate_in_every_run(function, arguments | wide, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [500, 1500])
def test_recomputing_gives_the_same_gradients_on_the_gpu(tokens):
    function, arguments = gpu_arguments("delta_rule", 2, tokens, 128, 64, torch.bfloat16)
    expected = gpu_gradients(function, arguments, "triton")
    actual = gpu_gradients(function, arguments, "triton", recompute=True)
    assert all(torch.equal(actual[name], expected[name]) for name in arguments)
    # States that are not kept have a unit for each of their rows, in which small numbers have more bits.
    assert all(error(actual[name], expected[name]) <= 1e-4 for name in expected.keys() - arguments.keys())


@pytest.mark.gpu
@pytest.mark.parametrize("op", TRITON_OPS)
def test_compiled_graph_takes_any_length_on_the_gpu(op):
    torch._dynamo.reset()  # graphs of earlier operations would count towards the limit of recompilations
    compiled = torch.compile(lambda function, tensors: function(**tensors, backend="triton")[0], dynamic=True)
    for tokens in (300, 1100, 64):
        function, arguments = gpu_arguments(op, 2, tokens, 128, 4, torch.float32)
        torch.testing.assert_close(compiled(function, arguments), function(**arguments, backend="triton")[0])


@pytest.mark.gpu
@pytest.mark.parametrize("op", TRITON_OPS)
def test_compiled_graph_holds_the_kernel(op):
    torch._dynamo.reset()
    function, arguments = gpu_arguments(op, 2, 64, 128, 4, torch.float32)

    def call(**tensors):
        return function(**tensors, backend="triton")[0]

    compiled = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(compiled(**arguments), call(**arguments))
    expected, actual = (
        gpu_gradients(function, arguments, "triton"),
        gpu_gradients(torch.compile(function), arguments, "triton"),
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", TRITON_OPS)
def test_cuda_graph_replays_the_kernel(op):
    function, arguments = gpu_arguments(op, 2, 64, 128, 4, torch.float32)
    expected = function(**arguments, backend="triton")[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(**arguments, backend="triton")[0]
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)
