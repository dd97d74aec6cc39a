"""The one-token Triton kernels: interpreted on the CPU at small shapes, and at real ones on a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import assert_accurate, error, list_variants, make_inputs, results, step_results
from representatives import cover_operations
from torch.utils._pytree import tree_leaves

from longseq import kernels, mixers
from longseq.kernels.dispatch import list_stepped_ops
from longseq.kernels.recurrence import each
from longseq.state import state_tensors

CASES = [(op, variant) for op in list_stepped_ops() for variant in list_variants(op)]
LARGEST_OF_FLOAT16 = torch.finfo(torch.float16).max
# Sizes that fill no block, and sizes that one program cannot hold at once: the largest allowed of each dimension.
ODD = [
    ("cumulative_softmax", "plain", {"H": 3, "M": 300}),
    ("delta_rule", "gated_write_key", {"K": 33, "V": 37}),
    ("delta_rule", "plain", {"K": 512, "V": 20}),
    ("linear_attention", "channel_gated", {"K": 65, "V": 17}),
    ("linear_attention", "value_gated", {"K": 1, "V": 70}),
    ("linear_attention", "head_gated", {"K": 512, "V": 40}),
    ("longhorn_scan", "plain", {"D": 3, "N": 512}),
    ("selective_scan", "plain", {"D": 67, "N": 20}),
    ("orthogonal_recurrence", "gated", {"D": 17, "M": 33}),
    ("orthogonal_recurrence", "ttt", {"D": 512, "M": 70}),
    ("recursive_least_squares", "plain", {"K": 130}),
    ("short_convolution", "silu", {"D": 150, "W": 7}),
    ("short_convolution", "no_bias", {"D": 3, "W": 512}),
    ("slot_attention", "write", {"M": 33, "K": 40, "V": 300}),
    ("slot_attention", "plain", {"M": 512, "K": 70, "V": 40}),
    ("variational_linear_attention", "plain", {"K": 130, "V": 20}),
    ("variational_linear_attention", "fixed", {"K": 33, "V": 17}),
]


def draw(op, variant=None, dtype=torch.float32, **options):
    """Inputs whose state is float32 whatever the dtype of the rest."""
    inputs = make_inputs(op, variant, dtype=torch.float32, **options)
    rest = {name: x for name, x in inputs.tensors.items() if not name.startswith("initial_state")}
    if dtype == torch.float16:
        rest = {name: x.clamp(-LARGEST_OF_FLOAT16, LARGEST_OF_FLOAT16) for name, x in rest.items()}
    return inputs.replace({name: x.to(dtype) for name, x in rest.items()})


def assert_as_accurate_as_torch(inputs):
    exact, plain = step_results(inputs.map(torch.Tensor.double), backend="torch"), step_results(inputs, backend="torch")
    actual = step_results(inputs, backend="triton")
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert value.dtype == plain[name].dtype
        assert_accurate(value, plain[name], exact[name], name)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant"), CASES)
def test_steps_equal_the_recurrence(interpreted, op, variant):
    assert_as_accurate_as_torch(draw(op, variant, batch=1, tokens=2))
    if variant == list_variants(op)[0]:
        assert_as_accurate_as_torch(draw(op, variant, torch.float16, tokens=2, sizes={"H": 1}))


@pytest.mark.parametrize(("op", "variant", "sizes"), ODD)
def test_odd_and_large_sizes(interpreted, op, variant, sizes):
    assert_as_accurate_as_torch(draw(op, variant, batch=1, tokens=2, sizes={"H": 1, **sizes}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in cover_operations() if mixers.get(name).operations])
def test_mixers_step_by_the_kernels(interpreted, name):
    torch.manual_seed(0)
    plain, ours = mixers.create(name, 32, backend="torch"), mixers.create(name, 32, backend="triton")
    ours.load_state_dict(plain.state_dict())
    x, state = torch.randn(3, 2, 32).unbind(), plain.initial_state(2)
    expected_state = state
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for token in x:
            expected, expected_state = plain.step(token, expected_state)
            actual, state = ours.step(token, state)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    launched = [event.key for event in profile.key_averages() if event.key.startswith("longseq::")]
    assert launched
    for (label, value), (_, wanted) in zip(state_tensors(state), state_tensors(expected_state), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5, msg=label)
    ours.step(x[0].requires_grad_(), state)[0].sum().backward()  # with gradients, the torch form runs


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_other_activations_of_slots(interpreted, activation):
    inputs = draw("slot_attention", tokens=2)
    inputs.options["activation"] = activation
    assert_as_accurate_as_torch(inputs)


@pytest.mark.parametrize("options", [{"objective": "encode", "normalize": False}, {"objective": "ttt"}], ids=str)
def test_orthogonal_steps_with_options_together(interpreted, options):
    inputs = draw("orthogonal_recurrence", "gated", tokens=2)
    inputs.options.update(options)
    assert_as_accurate_as_torch(inputs)


def test_a_state_that_is_not_symmetric_counts_as_its_symmetric_part(interpreted):
    inputs = draw("recursive_least_squares", tokens=2)
    A, steps = inputs.initial_state
    skew = torch.triu(torch.ones_like(A), 1)
    skewed = inputs.replace({"initial_state[0]": A + skew - skew.mT, "initial_state[1]": steps})
    assert_as_accurate_as_torch(skewed)
    after = step_results(skewed, backend="triton")["final_state[0]"]
    assert torch.equal(after, after.mT)


def test_small_shares_and_decays_are_not_lost_in_rounding(interpreted):
    logits, state = torch.full((1, 1, 1), -18.0), torch.zeros(1, 1, 1)
    share, _ = kernels.cumulative_softmax_step(logits, state, backend="triton")
    torch.testing.assert_close(-share, logits.exp(), rtol=1e-6, atol=0)
    sizes = torch.tensor([1e-9, 1e-4, 0.1, 0.49, 0.51, 5.0])
    inputs = make_inputs("slot_attention", dtype=torch.float32, batch=1, tokens=1, sizes={"M": len(sizes)})
    inputs = inputs.replace({"g": -sizes.expand_as(inputs.sequences["g"])})
    inputs = inputs.replace({f"initial_state[{i}]": torch.zeros_like(x) for i, x in enumerate(inputs.initial_state)})
    exact, actual = (
        step_results(inputs.map(torch.Tensor.double), backend="torch"),
        step_results(inputs, backend="triton"),
    )
    torch.testing.assert_close(actual["final_state[0]"].double(), exact["final_state[0]"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", list_stepped_ops())
def test_strided_inputs_and_the_given_state_are_left_as_they_are(interpreted, op):
    inputs = draw(op, batch=3, tokens=1)
    # of all rows the same state, as expand makes it
    inputs = inputs.replace(
        {name: x[:1].expand_as(x) for name, x in inputs.arguments.items() if name.startswith("initial_state")}
    )
    strided = inputs.map(lambda x: torch.stack((x, x), dim=-2).unbind(-2)[1])
    contiguous = inputs.map(torch.Tensor.contiguous)
    copies = [x.clone() for x in contiguous.arguments.values()]
    with torch.no_grad():
        expected = contiguous.step(0, contiguous.initial_state, backend="triton")
        for other in (inputs, strided):
            actual = other.step(0, other.initial_state, backend="triton")
            assert all(torch.equal(x, y) for x, y in zip(leaves(actual), leaves(expected), strict=True))
    assert all(torch.equal(x, copy) for x, copy in zip(contiguous.arguments.values(), copies, strict=True))


def leaves(returned):
    return list(results(*returned).values())


@pytest.mark.slow
@pytest.mark.parametrize("op", ["delta_rule", "longhorn_scan", "slot_attention"])  # a GPU compiles all
def test_compiled_graph_holds_the_kernel_whole(interpreted, op):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda inputs: inputs.step(0, inputs.initial_state, backend="triton"), fullgraph=True, backend="aot_eager"
    )
    for batch in (2, 3):
        inputs = draw(op, batch=batch, tokens=1)
        for x in (*inputs.sequences.values(), *tree_leaves(inputs.initial_state)):
            torch._dynamo.maybe_mark_dynamic(x, 0)  # as torch does when it sees a second size
        with torch.no_grad():
            expected = inputs.step(0, inputs.initial_state, backend="triton")
            for ours, theirs in zip(leaves(compiled(inputs)), leaves(expected), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("op", list_stepped_ops())
def test_a_wanted_gradient_is_refused_and_auto_gives_it(interpreted, op):
    inputs = draw(op, tokens=1).map(lambda x: x.requires_grad_())
    with pytest.raises(ValueError, match="has no gradient, and an input requires one") as caught:
        inputs.step(0, inputs.initial_state, backend="triton")
    assert "\n" not in str(caught.value)
    assert "use backend='torch'" in str(caught.value)
    o, _ = inputs.step(0, inputs.initial_state)
    assert o.requires_grad
    with torch.no_grad():
        assert not inputs.step(0, inputs.initial_state, backend="triton")[0].requires_grad


@pytest.mark.parametrize("op", list_stepped_ops())
def test_states_of_another_precision_are_refused(interpreted, op):
    inputs = draw(op, tokens=1)
    for dtype, words in ((torch.bfloat16, "keeps states in float32"), (torch.float64, "backend='torch'")):
        state = each(lambda x, to=dtype: x.to(to) if x.is_floating_point() else x, inputs.initial_state)
        with pytest.raises(ValueError, match=f"backend 'triton' of {op}_step cannot run: .*{words}"):
            inputs.step(0, state, backend="triton")
        o, after = inputs.step(0, state)
        assert (o.dtype, leaves((o, after))[1].dtype) == (torch.float32, dtype)


REAL = [
    ("cumulative_softmax", "plain", 64, {"H": 4, "M": 64}),
    ("delta_rule", "plain", 1, {"H": 16, "K": 64, "V": 64}),
    ("delta_rule", "gated_write_key", 64, {"H": 16, "K": 128, "V": 128}),
    ("delta_rule", "gated", 3, {"H": 4, "K": 256, "V": 512}),
    ("delta_rule", "plain", 2, {"H": 2, "K": 512, "V": 100}),
    ("linear_attention", "plain", 1, {"H": 16, "K": 64, "V": 65}),
    ("linear_attention", "head_gated", 64, {"H": 24, "K": 128, "V": 64}),
    ("linear_attention", "channel_gated", 3, {"H": 4, "K": 256, "V": 512}),
    ("linear_attention", "value_gated", 5, {"H": 10, "K": 1, "V": 256}),
    ("linear_attention", "channel_gated", 2, {"H": 2, "K": 512, "V": 100}),
    ("longhorn_scan", "plain", 1, {"D": 4096, "N": 16}),
    ("longhorn_scan", "extreme_decay", 64, {"D": 384, "N": 16}),
    ("selective_scan", "plain", 3, {"D": 1536, "N": 128}),
    ("selective_scan", "extreme_decay", 2, {"D": 100, "N": 5}),
    ("orthogonal_recurrence", "plain", 1, {"H": 16, "D": 64, "M": 64}),
    ("orthogonal_recurrence", "encode", 16, {"H": 4, "D": 128, "M": 64}),
    ("orthogonal_recurrence", "similarity", 3, {"H": 4, "D": 128, "M": 128}),
    ("orthogonal_recurrence", "ttt", 3, {"H": 4, "D": 64, "M": 64}),
    ("orthogonal_recurrence", "unnormalized", 2, {"H": 2, "D": 100, "M": 50}),
    ("orthogonal_recurrence", "gated", 2, {"H": 2, "D": 512, "M": 300}),
    ("recursive_least_squares", "plain", 64, {"H": 16, "K": 64}),
    ("recursive_least_squares", "plain", 3, {"H": 4, "K": 128}),
    ("recursive_least_squares", "no_refresh", 2, {"H": 2, "K": 300}),
    ("short_convolution", "silu", 64, {"D": 6144, "W": 4}),
    ("short_convolution", "no_bias", 1, {"D": 1000, "W": 3}),
    ("slot_attention", "plain", 1, {"H": 4, "K": 256, "V": 256, "M": 64}),
    ("slot_attention", "write", 16, {"H": 4, "K": 512, "V": 512, "M": 64}),
    ("slot_attention", "relu_squared", 3, {"H": 4, "K": 64, "V": 64, "M": 64}),
    ("slot_attention", "extreme_decay", 2, {"H": 2, "K": 100, "V": 70, "M": 300}),
    ("variational_linear_attention", "plain", 64, {"H": 16, "K": 64, "V": 64}),
    ("variational_linear_attention", "fixed", 3, {"H": 4, "K": 128, "V": 128}),
    ("variational_linear_attention", "unnormalized_alpha", 2, {"H": 2, "K": 300, "V": 100}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("op", "variant", "batch", "sizes"), REAL)
def test_real_sizes_on_the_gpu(op, variant, batch, sizes, dtype):
    inputs = draw(op, variant, dtype, batch=batch, tokens=3, sizes=sizes)
    exact, plain = step_results(inputs.map(torch.Tensor.double), backend="torch"), step_results(inputs, backend="torch")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory is NaN until it is written
    try:
        first, second = (step_results(inputs.to("cuda"), backend="triton") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in exact.items():
        # The last term is the error of the hardware's exp, sigmoid and division, which matters in float32 only.
        allowed = 2 * error(plain[name], value) + 64 * torch.finfo(torch.float32).eps
        assert error(first[name].cpu(), value) <= allowed, name
        assert torch.equal(first[name], second[name]), f"{name} differs from run to run"


@pytest.mark.gpu
@pytest.mark.parametrize("op", list_stepped_ops())
def test_cuda_graph_takes_one_step_after_another(op):
    inputs = draw(op, tokens=4).to("cuda")
    expected = step_results(inputs, backend="triton")  # compiles the kernel, which a capture cannot
    token, state = inputs.cut(0, 1).map(torch.clone), each(torch.clone, inputs.initial_state)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output, after = token.step(0, state, backend="triton")
        each(lambda old, new: old.copy_(new), state, after)
    state = each(lambda held, first: held.copy_(first), state, inputs.initial_state)
    outputs = []
    for t in range(inputs.tokens):
        for name, x in token.sequences.items():
            x.copy_(inputs.sequences[name][:, t : t + 1])
        graph.replay()
        outputs.append(output.clone())
    for name, value in results(torch.stack(outputs, 1), state).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("op", list_stepped_ops())
def test_compiled_steps_on_the_gpu(op):
    inputs = draw(op, tokens=1).to("cuda")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda inputs: inputs.step(0, inputs.initial_state, backend="triton"), fullgraph=True, mode="reduce-overhead"
    )
    with torch.no_grad():
        expected = inputs.step(0, inputs.initial_state, backend="triton")
        for _ in range(3):  # the third call replays a CUDA graph
            for ours, theirs in zip(leaves(compiled(inputs)), leaves(expected), strict=True):
                torch.testing.assert_close(ours, theirs)
