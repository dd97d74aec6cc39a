"""Inputs without a gradient: the other gradients do not change, and kernels and memory for theirs are saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longseq.kernels import short_convolution
from longseq.kernels.testing import Inputs, make_inputs, results

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
    torch.manual_seed(0)
    loss = torch.stack([(x * torch.randn_like(x)).sum() for x in returned.values() if x.requires_grad]).sum()
    loss.backward()
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
