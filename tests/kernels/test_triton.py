"""The Triton kernels: emulated on the CPU at tiny shapes, and at real ones on a GPU."""

from __future__ import annotations

import pytest
import torch

from longseq.kernels import delta_rule, explain, list_ops, longhorn_scan, selective_scan, short_convolution
from longseq.kernels.dispatch import backends
from longseq.kernels.testing import assert_accurate, error, gradients, list_variants, make_inputs

TRITON_OPS = [op for op in list_ops() if any(backend.name == "triton" for backend in backends(op))]
CASES = [(op, variant) for op in TRITON_OPS for variant in list_variants(op)]


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's interpreter, and memory that is NaN until it is written."""
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here, in the tests below")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def assert_as_accurate_as_torch(inputs, exact, device="cpu", **options):
    """Compare outputs, final state and gradients with float64; the torch form in the same precision sets the bar."""
    plain = gradients(inputs, backend="torch", **options)
    actual = gradients(inputs.map(lambda x: x.to(device)), backend="triton", **options)
    assert actual.keys() == exact.keys()
    for name, value in exact.items():
        assert_accurate(actual[name].cpu(), plain[name], value, name)


@pytest.mark.parametrize(("op", "variant"), CASES)
@pytest.mark.parametrize("tokens", [1, 11])
def test_kernel_equals_the_recurrence(interpreted, op, variant, tokens):
    exact = gradients(make_inputs(op, variant, tokens=tokens), backend="reference")
    assert_as_accurate_as_torch(make_inputs(op, variant, tokens=tokens, dtype=torch.float32), exact)


@pytest.mark.parametrize("op", TRITON_OPS)
def test_packed_segments_are_separate(interpreted, op):
    bounds = torch.tensor([0, 3, 3, 4, 11])
    variant = list_variants(op)[0]
    exact = gradients(make_inputs(op, variant, segments=4, tokens=11), backend="reference", cu_seqlens=bounds)
    inputs = make_inputs(op, variant, segments=4, tokens=11, dtype=torch.float32)
    assert_as_accurate_as_torch(inputs, exact, cu_seqlens=bounds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("form", ["short", "long"])
def test_delta_rule_over_several_chunks(interpreted, monkeypatch, form, dtype):
    from longseq.kernels.delta_rule import triton_delta

    monkeypatch.setattr(triton_delta, "SHORT_TOKENS", 1024 if form == "short" else 0)
    bounds = torch.tensor([0, 3, 3, 68, 70])  # the third segment has two chunks
    inputs = make_inputs("delta_rule", "gated_write_key", tokens=70, segments=4, dtype=dtype)
    exact = gradients(inputs.map(torch.Tensor.double), backend="reference", cu_seqlens=bounds)
    actual = gradients(inputs, backend="triton", cu_seqlens=bounds)
    for name, value in exact.items():
        # Products of float16 numbers whatever the dtype, then rounding, where the interpreter cuts bfloat16 off.
        assert error(actual[name], value) <= 2e-3 + torch.finfo(dtype).eps, name


@pytest.mark.parametrize("variant", ["repeated_keys", "extreme_decay"])
def test_delta_rule_over_several_float32_chunks(interpreted, variant):
    exact = gradients(make_inputs("delta_rule", variant, batch=1, tokens=70), backend="reference")
    assert_as_accurate_as_torch(make_inputs("delta_rule", variant, batch=1, tokens=70, dtype=torch.float32), exact)


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


@pytest.mark.parametrize("op", TRITON_OPS)
def test_strided_inputs_need_no_copy(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=7, dtype=torch.float32)
    strided = inputs.map(lambda x: torch.stack((x, x), dim=-2).unbind(-2)[1] if x.ndim >= 3 else x)
    assert not strided.initial_state.is_contiguous()
    expected, actual = inputs.run(backend="triton"), strided.run(backend="triton")
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("op", TRITON_OPS)
def test_compiled_graph_holds_the_kernel_whole(interpreted, op):
    inputs = make_inputs(op, list_variants(op)[0], tokens=5, dtype=torch.float32)
    expected = gradients(inputs, backend="triton")
    torch._dynamo.reset()
    compiled = torch.compile(inputs.run, fullgraph=True, backend="aot_eager")
    o, state = compiled(backend="triton")
    torch.testing.assert_close(
        {"output": o, "final_state": state}, {name: expected[name] for name in ("output", "final_state")}
    )


def test_convolution_passes_over_padding(interpreted):
    inputs = make_inputs("short_convolution", "silu", batch=3, tokens=6, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    expected, actual = inputs.run(backend="reference", mask=mask), inputs.run(backend="triton", mask=mask)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


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


def test_states_too_wide_for_registers_are_refused():
    x, narrow, wide = torch.zeros(1, 2, 3), torch.zeros(1, 2, 64), torch.zeros(1, 2, 65)
    sizes = {"N": wide.shape[-1]}
    assert any("at most 64" in reason for reason in explain("longhorn_scan", device="cuda", sizes=sizes)["triton"])
    sizes = {"N": narrow.shape[-1]}
    assert explain("longhorn_scan", device="cuda", sizes=sizes)["triton"] == []
    with pytest.raises(ValueError, match="at most 64 entries"):
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
    # channels are heads times entries, and a head has as many keys as values
    ("delta_rule", 2, 197, 384, 64),
    ("delta_rule", 1, 4097, 256, 64),
    ("delta_rule", 1, 16384, 256, 128),
    ("delta_rule", 2, 1000, 512, 256),
    ("delta_rule", 3, 500, 100, 50),
]
# (batch, tokens, heads, K, V, with a write key, with gates, segments)
DELTA_SHAPES = [
    (2, 300, 3, 64, 32, True, True, None),
    (2, 1500, 2, 128, 64, True, True, None),
    (1, 2000, 2, 128, 128, False, True, (0, 3, 3, 700, 1999, 2000)),
    (1, 700, 2, 64, 64, True, False, (0, 64, 65, 700)),
    (1, 1100, 2, 256, 128, True, False, None),
    (1, 1100, 2, 96, 256, False, True, None),
]


def gpu_arguments(op, batch, tokens, channels, entries, dtype):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    if op == "delta_rule":
        return delta_rule, delta_arguments(normal, batch, tokens, channels // entries, entries, entries)
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


def gpu_gradients(function, arguments, backend, **options):
    leaves = {name: value.detach().requires_grad_() for name, value in arguments.items()}
    o, state = function(**leaves, **options, output_final_state=True, backend=backend)
    # Random signs: of weights in order, half of a sum over time would cancel the other half, and round off be all.
    generator = torch.Generator(o.device).manual_seed(1)
    weights = torch.randn(o.shape, device=o.device, dtype=torch.float64, generator=generator).to(o.dtype)
    loss = (o * weights).sum() + state.sum()
    return {"o": o, "state": state} | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_accurate_in_every_run(function, arguments, dtype, **options):
    """Compare with float64: twice the torch form's own error is allowed, and no difference from run to run."""
    exact = gpu_gradients(function, {name: value.double() for name, value in arguments.items()}, "torch", **options)
    plain = gpu_gradients(function, arguments, "torch", **options)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory is NaN until it is written
    try:
        runs = [gpu_gradients(function, arguments, "triton", **options) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    factor = 2
    if function is delta_rule and dtype != torch.float32:
        # Its products are those of float16 numbers, while the torch form computes in float32: a state is as good as one
        # rounded to the inputs' precision, and of float16 inputs more is lost than by rounding the results.
        plain = {name: value.to(dtype) for name, value in plain.items()}
        factor = 4 if dtype == torch.float16 else 2
    for name, value in exact.items():
        # The last term is that of the hardware's exp and sigmoid, which count in float32 alone.
        allowed = factor * error(plain[name], value) + 64 * torch.finfo(torch.float32).eps
        assert error(runs[0][name], value) <= allowed, name
        for run in runs[1:]:
            assert torch.equal(run[name], runs[0][name]), f"{name} differs from run to run"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=[f"{op}-{t}-{d}-{n}" for op, _, t, d, n in GPU_SHAPES])
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
@pytest.mark.parametrize("op", TRITON_OPS)
def test_compiled_graph_holds_the_kernel(op):
    function, arguments = gpu_arguments(op, 2, 64, 128, 4, torch.float32)

    def call(**tensors):
        return function(**tensors)[0]

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
