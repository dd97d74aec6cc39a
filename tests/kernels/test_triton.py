"""The Triton kernels: emulated on the CPU at tiny shapes, and at real ones on a GPU."""

from __future__ import annotations

import pytest
import torch

from longseq.kernels import explain, list_ops, longhorn_scan, selective_scan, short_convolution
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
    strided = inputs.map(lambda x: torch.stack((x, x), dim=-2).unbind(-2)[1] if x.ndim == 3 else x)
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


@pytest.mark.parametrize("op", TRITON_OPS)
def test_reasons_name_the_remedy(op):
    reasons = explain(op, device="cpu", dtype=torch.float64, exporting=True)["triton"]
    assert len(reasons) == (2 if torch.cuda.is_available() else 3)
    assert any("float64" in reason and "backend='torch'" in reason for reason in reasons)
    assert explain(op, device="cuda")["triton"] == []


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
]


def gpu_arguments(op, batch, tokens, channels, entries, dtype):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    x = normal(batch, tokens, channels)
    if op == "short_convolution":
        return short_convolution, {"x": x, "weight": normal(channels, entries), "bias": normal(channels)}
    rate = normal(batch, tokens, channels).sigmoid()
    key, query = normal(batch, tokens, entries), normal(batch, tokens, entries)
    if op == "longhorn_scan":
        return longhorn_scan, {"x": x, "q": query, "k": key, "beta": rate}
    A = -normal(channels, entries).float().exp()
    return selective_scan, {"x": x, "delta": rate, "A": A, "B": key, "C": query}


def gpu_gradients(function, arguments, backend):
    leaves = {name: value.detach().requires_grad_() for name, value in arguments.items()}
    o, state = function(**leaves, output_final_state=True, backend=backend)
    # Random signs: of weights in order, half of a sum over time would cancel the other half, and round off be all.
    generator = torch.Generator(o.device).manual_seed(1)
    weights = torch.randn(o.shape, device=o.device, dtype=torch.float64, generator=generator).to(o.dtype)
    loss = (o * weights).sum() + state.sum()
    return {"o": o, "state": state} | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=[f"{op}-{t}-{d}-{n}" for op, _, t, d, n in GPU_SHAPES])
def test_real_sizes_on_the_gpu(shape, dtype):
    function, arguments = gpu_arguments(*shape, dtype)
    exact = gpu_gradients(function, {name: value.double() for name, value in arguments.items()}, "torch")
    plain = gpu_gradients(function, arguments, "torch")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory is NaN until it is written
    try:
        runs = [gpu_gradients(function, arguments, "triton") for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in exact.items():
        # The last term is that of the hardware's exp and sigmoid, which count in float32 alone.
        allowed = 2 * error(plain[name], value) + 64 * torch.finfo(torch.float32).eps
        assert error(runs[0][name], value) <= allowed, name
        for run in runs[1:]:
            assert torch.equal(run[name], runs[0][name]), f"{name} differs from run to run"


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
