"""Inputs without a gradient: the other gradients do not change, and kernels and memory for theirs are saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any

import pytest
import torch
from cases import cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from longseq.kernels import list_ops, short_convolution
from longseq.kernels.testing import Inputs, list_variants, make_inputs, results, takes_chunk_size

CASES = [
    ("linear_attention", "plain", "q"),
    ("linear_attention", "plain", "k"),
    ("linear_attention", "plain", "v"),
    ("linear_attention", "plain", "q k"),
    ("linear_attention", "head_gated", "q g"),
    ("linear_attention", "head_gated", "v"),
    ("linear_attention", "channel_gated", "q"),
    ("linear_attention", "channel_gated", "k g"),
    ("linear_attention", "value_gated", "q k"),
    ("delta_rule", "plain", "q"),
    ("delta_rule", "plain", "k beta"),
    ("delta_rule", "plain", "q k beta"),
    ("delta_rule", "gated_write_key", "q"),
    ("delta_rule", "gated_write_key", "k beta write_key g"),
    ("short_convolution", "plain", "weight bias"),
    ("short_convolution", "plain", "initial_state"),
    ("short_convolution", "silu", "weight bias"),
    ("convolved_features", "plain", "weight"),
    ("add_norm", "bias", "weight bias"),
    ("add_norm", "branch", "weight"),
    ("add_norm", "pair", "weight"),
    ("silu_product", "skip", "skip_weight"),
    ("silu_product", "pair", "skip_weight"),
    ("head_features", "logits", "x"),
    ("head_features", "logits_pair", "x"),
    ("head_features", "logits", "logits"),
    ("longhorn_pair", "plain", "taps offset"),
    ("longhorn_pair", "plain", "selection"),
    ("longhorn_pair", "plain", "rate rate_offset"),
    ("longhorn_pair", "plain", "skip rate_offset"),
    ("longhorn_scan", "plain", "x"),
    ("longhorn_scan", "plain", "q k"),
    ("longhorn_scan", "plain", "beta initial_state"),
    ("longhorn_scan", "plain", "k"),
    ("selective_scan", "plain", "A"),
    ("selective_scan", "plain", "x delta A"),
    ("selective_scan", "plain", "B C delta initial_state"),
    ("orthogonal_recurrence", "plain", "q"),
    ("orthogonal_recurrence", "gated", "k v gamma g initial_state"),
    ("orthogonal_recurrence", "gated", "k v gamma g"),
    ("orthogonal_recurrence", "gated", "q k gamma initial_state"),
    ("orthogonal_recurrence", "encode", "v gamma"),
    ("orthogonal_recurrence", "similarity", "k v gamma initial_state"),
    ("orthogonal_recurrence", "ttt", "k v gamma initial_state"),
    ("orthogonal_recurrence", "ttt", "q v"),
    ("orthogonal_recurrence", "l1", "q k gamma"),
    ("orthogonal_recurrence", "l1", "v threshold initial_state"),
    ("recursive_least_squares", "plain", "x"),
    ("recursive_least_squares", "plain", "u"),
    ("recursive_least_squares", "plain", "u initial_state[0]"),
    ("recursive_least_squares", "no_refresh", "x initial_state[0]"),
    ("variational_linear_attention", "plain", "q"),
    ("variational_linear_attention", "plain", "k"),
    ("variational_linear_attention", "plain", "u initial_state[1]"),
    ("variational_linear_attention", "plain", "k u initial_state[1] initial_state[2]"),
    ("variational_linear_attention", "plain", "q k u initial_state[0] initial_state[1] initial_state[2]"),
    ("variational_linear_attention", "plain", "q v initial_state[0]"),
    ("variational_linear_attention", "fixed", "initial_state[1]"),
    ("variational_linear_attention", "unnormalized_key", "q k"),
    ("variational_linear_attention", "no_normalizer", "q k initial_state[2]"),
]


def run(inputs: Inputs) -> Any:
    return inputs.run(backend="triton")


def differentiate(
    op: str, variant: str, frozen: tuple[str, ...], run: Callable[[Inputs], Any] = run, **of_inputs: Any
) -> dict[str, Tensor]:
    inputs = make_inputs(op, variant, **{"tokens": 11, "dtype": torch.float32, **of_inputs})
    inputs = inputs.replace({name: x.detach().requires_grad_(name not in frozen) for name, x in inputs.tensors.items()})
    returned = results(*run(inputs))
    torch.manual_seed(0)  # each result has the same weights, whichever results have a gradient
    terms = [(x * torch.randn_like(x)).sum() for x in returned.values() if x.is_floating_point()]
    torch.stack([x for x in terms if x.requires_grad]).sum().backward()
    assert all(inputs.tensors[name].grad is None for name in frozen)
    return {name: x.grad for name, x in inputs.tensors.items() if name not in frozen}


differentiate_all = functools.cache(functools.partial(differentiate, frozen=()))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant", "names"), CASES)
def test_a_frozen_input_changes_no_other_gradient(interpreted, op, variant, names) -> None:
    frozen = tuple(names.split())
    whole, rest = differentiate_all(op, variant), differentiate(op, variant, frozen)
    assert rest.keys() == whole.keys() - set(frozen)
    assert all(torch.equal(rest[name], whole[name]) for name in rest)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("op", "variant"), dict.fromkeys(case[:2] for case in CASES))
def test_a_frozen_input_changes_no_other_gradient_on_a_gpu(op, variant, dtype) -> None:
    """With several chunks, the last of which is not full. A compiler may round otherwise without a gradient's store."""
    call = functools.partial(differentiate, op, variant, dtype=dtype, tokens=150, device="cuda")
    whole = call(())
    for names in (case[2] for case in CASES if case[:2] == (op, variant)):
        frozen = tuple(names.split())
        rest = call(frozen)
        assert rest.keys() == whole.keys() - set(frozen)
        for name, found in rest.items():
            error = (found - whole[name]).float().norm() / whole[name].float().norm()
            assert error < (1e-6 if dtype == torch.float32 else 1e-3), (names, name, float(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "variant", "names"),
    [
        ("head_features", "logits", "x"),
        ("longhorn_pair", "plain", "selection rate rate_offset"),
        ("selective_scan", "plain", "B C A"),
        ("orthogonal_recurrence", "gated", "k v gamma g initial_state"),
        ("recursive_least_squares", "plain", "u initial_state[0]"),
        ("variational_linear_attention", "plain", "k u initial_state[1]"),
    ],
)
def test_a_frozen_input_of_a_compiled_graph(interpreted, op, variant, names) -> None:
    torch._dynamo.reset()
    frozen = tuple(names.split())
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, actual = (differentiate(op, variant, frozen, run=form) for form in (run, compiled))
    torch.testing.assert_close(actual, expected)


@pytest.fixture
def allocated(monkeypatch) -> Callable[[], int]:
    """Returns the numbers that kernels' launches have allocated since its last call."""
    total = 0

    def count(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal total
            x = make(*args, **kwargs)
            total += x.numel()
            return x

        return call

    def take() -> int:
        nonlocal total
        taken, total = total, 0
        return taken

    monkeypatch.setattr(torch.Tensor, "new_empty", count(torch.Tensor.new_empty))
    return take


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "variant", "names"),
    [
        # Partial sums of each program for each tap and channel, or for each channel.
        ("short_convolution", "silu", "weight bias"),
        ("convolved_features", "plain", "weight"),
        ("add_norm", "plain", "weight"),
        ("silu_product", "skip", "skip_weight"),
        ("delta_rule", "plain", "q"),
        ("delta_rule", "plain", "q k beta"),
        ("linear_attention", "plain", "q k"),
        ("linear_attention", "plain", "v"),
        ("linear_attention", "value_gated", "q k"),
        ("head_features", "logits", "x"),
        ("longhorn_pair", "plain", "taps offset"),
        ("longhorn_pair", "plain", "rate rate_offset"),
        ("longhorn_scan", "plain", "x beta"),
        ("longhorn_scan", "plain", "q k"),
        ("selective_scan", "plain", "A delta"),
        ("orthogonal_recurrence", "gated", "q"),
        ("orthogonal_recurrence", "gated", "k v gamma g initial_state"),
        ("orthogonal_recurrence", "l1", "v threshold"),
        ("recursive_least_squares", "plain", "x"),
        ("recursive_least_squares", "plain", "u initial_state[0]"),
        ("variational_linear_attention", "plain", "q k"),
        ("variational_linear_attention", "plain", "u initial_state[1]"),
    ],
)
def test_a_frozen_input_takes_no_memory(interpreted, allocated, op, variant, names) -> None:
    frozen = tuple(names.split())
    sizes = {name: x.numel() for name, x in make_inputs(op, variant, tokens=11, dtype=torch.float32).tensors.items()}
    counts = []
    for without in ((), frozen):
        allocated()
        differentiate(op, variant, without)
        counts.append(allocated())
    assert counts[0] - counts[1] >= sum(sizes[name] for name in frozen)


def test_a_frozen_gradient_launches_no_kernel(interpreted, monkeypatch) -> None:
    from longseq.kernels.linear_attention import triton_linear

    launched = []

    def watch(name: str, run: Any) -> Any:
        return lambda *args, **kwargs: launched.append(name) or run(*args, **kwargs)

    for name in ("score", "read", "differentiate"):
        monkeypatch.setattr(triton_linear._Passes, name, watch(name, getattr(triton_linear._Passes, name)))
    forward = ["score", "read"]
    for frozen, backward in ((("v",), ["score", "differentiate"]), (("q", "k"), ["read"])):
        differentiate("linear_attention", "plain", frozen)
        assert launched == forward + backward
        launched.clear()


def test_a_frozen_convolution_keeps_no_inputs(interpreted) -> None:
    """Without an activation the gradient of x is that of y, convolved."""
    x, weight = torch.randn(2, 64, 8, requires_grad=True), torch.randn(8, 4)
    kept: list[Tensor] = []
    for frozen in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            short_convolution(x, weight.requires_grad_(not frozen), backend="triton")
        assert any(tensor.numel() == x.numel() for tensor in kept) is not frozen


def run_torch(inputs: Inputs, **options: Any) -> Any:
    return inputs.run(backend="torch", **options)


def find_structures(op: str) -> list[str]:
    """The variants of an operation that differ in more than the values of their tensors."""
    found: dict[Any, str] = {}
    for variant in list_variants(op):
        inputs = make_inputs(op, variant)
        shapes = tuple((name, x.shape) for name, x in inputs.tensors.items())
        found.setdefault((shapes, str(inputs.options)), variant)
    return list(found.values())


def list_readings(op: str, variant: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Arguments of `make_inputs`, and options of a call: several chunks, and of the first variant other readings."""
    chunks = {"chunk_size": 4} if takes_chunk_size(op) and variant != "l1" else {}
    readings: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, chunks)]
    if op == "orthogonal_recurrence" and chunks:
        readings.append(({}, {"chunk_size": 1}))  # a loop over tokens, which is code of its own
    if variant == list_variants(op)[0]:
        readings.append(({"segments": 4}, {"cu_seqlens": torch.tensor([0, 3, 3, 4, 11])}))
        readings.append(({}, {**chunks, "reverse": "second_half"}))
    return readings


@pytest.mark.slow
@pytest.mark.parametrize("op", list_ops())
def test_a_frozen_input_changes_no_other_gradient_of_the_torch_form(op) -> None:
    """Each input is frozen alone, and trained alone."""
    for variant in find_structures(op):
        for of_inputs, options in list_readings(op, variant):
            call = functools.partial(
                differentiate,
                op,
                variant,
                run=functools.partial(run_torch, **options),
                dtype=torch.float64,
                **of_inputs,
            )
            whole = call(())
            for name in whole:
                for frozen in ((name,), tuple(whole.keys() - {name})):
                    rest = call(frozen)
                    assert rest.keys() == whole.keys() - set(frozen)
                    for other, gradient in rest.items():
                        assert torch.equal(gradient, whole[other]), (variant, options, frozen, other)


@pytest.mark.slow
def test_a_frozen_input_of_a_compiled_torch_form() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(run_torch, fullgraph=True, backend="aot_eager")
    frozen = ("q", "k", "beta", "g", "initial_state")
    expected, actual = (differentiate("delta_rule", "gated", frozen, run=form) for form in (run_torch, compiled))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("names", ["x", "bias", "x bias initial_state"])
def test_a_convolution_with_frozen_taps_has_the_second_derivatives_of_torch(names) -> None:
    """Bit for bit, also of taps that are trained beside it."""
    inputs = make_inputs("short_convolution", "silu", tokens=11, dtype=torch.float64)
    trained, found = names.split(), []
    for others in ([], ["weight"]):
        leaves = {name: x.detach().requires_grad_(name in trained + others) for name, x in inputs.tensors.items()}
        output, state = inputs.replace(leaves).run(backend="torch")
        wanted = [leaves[name] for name in trained]
        first = torch.autograd.grad(output.square().sum() + state.square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), wanted)
        found.append((*first, *second))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


class Numbers(TorchDispatchMode):
    """Counts the numbers that operations compute."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        if not function.is_view and isinstance(returned, Tensor):
            self.total += returned.numel()
        return returned


def measure(op: str, variant: str, trained: Set[str]) -> tuple[int, int]:
    """The work of a backward pass of the torch form, and the numbers kept for it.

    The work is the floating point operations of matrix products, and the numbers that all operations compute.
    """
    inputs = make_inputs(op, variant, tokens=64, dtype=torch.float32, sizes={"K": 16, "V": 16, "D": 16, "N": 16})
    inputs = inputs.replace({name: x.requires_grad_(name in trained) for name, x in inputs.tensors.items()})
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        output, _ = inputs.run(backend="torch")
    loss = output.sum()
    with FlopCounterMode(display=False) as products, Numbers() as numbers:
        loss.backward()
    return products.get_total_flops() + numbers.total, sum(x.numel() for x in kept.values())


@pytest.mark.slow
@cases(
    ("op", "variant", "trained", "work", "kept"),
    [
        ("delta_rule", "plain", "q", 0.30, 0.87),
        ("delta_rule", "plain", "v", 0.56, 0.84),
        ("delta_rule", "gated", "all but g", 0.89, 1.0),
        ("delta_rule", "gated_write_key", "k", 0.74, 1.0),
        ("delta_rule", "gated_write_key", "initial_state", 0.41, 0.86),
        ("linear_attention", "plain", "q", 0.40, 0.70),
        ("linear_attention", "plain", "initial_state", 0.06, 0.32),
        ("linear_attention", "head_gated", "k", 0.44, 0.63),
        ("linear_attention", "head_gated", "all but g", 0.97, 1.0),
        ("linear_attention", "channel_gated", "q", 0.40, 0.77),
        ("linear_attention", "channel_gated", "v", 0.46, 0.71),
        ("linear_attention", "value_gated", "v", 0.37, 0.71),
        ("linear_attention", "value_gated", "all but g_value", 0.87, 1.0),
        ("longhorn_scan", "plain", "x", 0.44, 0.51),
        ("longhorn_scan", "plain", "q", 0.39, 0.84),
        ("longhorn_scan", "plain", "all but k", 0.82, 1.0),
        ("selective_scan", "plain", "B", 0.47, 0.52),
        ("selective_scan", "plain", "C", 0.41, 0.84),
        ("selective_scan", "plain", "all but A", 0.96, 1.0),
        ("short_convolution", "plain", "x", 0.08, 0.03),
        ("short_convolution", "silu", "initial_state", 0.08, 0.50),
        ("convolved_features", "plain", "x", 0.03, 0.63),
        ("orthogonal_recurrence", "gated", "q", 0.50, 0.88),
        ("orthogonal_recurrence", "encode", "all but v", 0.82, 1.0),
        ("orthogonal_recurrence", "ttt", "all but k", 0.94, 1.0),
        ("recursive_least_squares", "plain", "x", 0.25, 0.81),
        ("recursive_least_squares", "plain", "all but u", 0.64, 1.0),
        ("cumulative_softmax", "plain", "initial_state", 0.95, 1.0),
        ("slot_attention", "plain", "v", 0.22, 0.22),
        ("slot_attention", "plain", "all but g", 0.76, 0.94),
        ("variational_linear_attention", "plain", "q", 0.21, 0.58),
        ("variational_linear_attention", "plain", "all but u", 0.90, 1.0),
    ],
)
def test_a_frozen_input_takes_no_work_and_no_memory_of_the_torch_form(op, variant, trained, work, kept) -> None:
    """Shares of what it takes with all inputs trained, not much above the measured ones."""
    names = make_inputs(op, variant).tensors.keys()
    _, all_but, name = trained.rpartition("all but ")
    some, whole = (measure(op, variant, part) for part in (names - {name} if all_but else {name}, names))
    assert some[0] <= work * whole[0]
    assert some[1] <= kept * whole[1]
