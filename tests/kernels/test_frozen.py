"""Inputs without a gradient: the other gradients do not change, and kernels and memory for theirs are saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_inputs import Inputs, list_variants, make_inputs, results, takes_chunk_size
from torch import Tensor

# The inputs that are frozen, by operation and variant.
FROZEN = {
    ("short_convolution", "plain"): ["weight bias", "initial_state"],
    ("short_convolution", "silu"): ["weight bias"],
    ("convolved_features", "plain"): ["weight"],
    ("add_norm", "bias"): ["weight bias"],
    ("add_norm", "branch"): ["weight"],
    ("add_norm", "pair"): ["weight"],
    ("silu_product", "skip"): ["skip_weight"],
    ("silu_product", "pair"): ["skip_weight"],
    ("head_features", "logits_pair"): ["x"],
    ("head_features", "logits"): ["x", "logits"],
    ("log_decay", "pair"): ["z", "A_log dt_bias", "z dt_bias"],
    ("longhorn_pair", "plain"): ["taps offset", "selection", "rate rate_offset", "skip rate_offset"],
    ("recursive_least_squares", "plain"): ["x", "u", "u initial_state[0]"],
    ("recursive_least_squares", "no_refresh"): ["x initial_state[0]"],
    ("variational_linear_attention", "plain"): [
        "q",
        "k",
        "u initial_state[1]",
        "k u initial_state[1] initial_state[2]",
        "q k u initial_state[0] initial_state[1] initial_state[2]",
        "q v initial_state[0]",
    ],
    ("variational_linear_attention", "fixed"): ["initial_state[1]"],
    ("variational_linear_attention", "unnormalized_key"): ["q k"],
    ("variational_linear_attention", "no_normalizer"): ["q k initial_state[2]"],
}
CASES = [(*case, names) for case, choices in FROZEN.items() for names in choices]


def run(inputs: Inputs) -> Any:
    return inputs.run(backend="triton")


def differentiate(
    op: str, variant: str, frozen: tuple[str, ...], run: Callable[[Inputs], Any] = run, **of_inputs: Any
) -> dict[str, Tensor]:
    inputs = make_inputs(op, variant, **{"batch": 1, "tokens": 3, "dtype": torch.float32, **of_inputs})
    inputs = inputs.replace({name: x.detach().requires_grad_(name not in frozen) for name, x in inputs.tensors.items()})
    returned = results(*run(inputs))
    torch.manual_seed(0)  # each result has the same weights, whichever results have a gradient
    terms = [(x * torch.randn_like(x)).sum() for x in returned.values() if x.is_floating_point()]
    torch.stack([x for x in terms if x.requires_grad]).sum().backward()
    assert all(inputs.tensors[name].grad is None for name in frozen)
    return {name: x.grad for name, x in inputs.tensors.items() if name not in frozen}


differentiate_all = functools.cache(functools.partial(differentiate, frozen=()))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant", "names"), {case[0]: case for case in CASES}.values())
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
    call = functools.partial(differentiate, op, variant, dtype=dtype, batch=2, tokens=150, device="cuda")
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
        ("longhorn_pair", "plain", "selection rate rate_offset"),
        ("variational_linear_attention", "plain", "k u initial_state[1]"),
    ],
)
def test_a_frozen_input_of_a_compiled_graph(interpreted, op, variant, names) -> None:
    torch._dynamo.reset()
    frozen = tuple(names.split())
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, actual = (differentiate(op, variant, frozen, run=form) for form in (run, compiled))
    torch.testing.assert_close(actual, expected)


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
    chunks = {"chunk_size": 4} if takes_chunk_size(op) else {}
    readings: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, chunks)]
    if variant == list_variants(op)[0]:
        readings.append(({"segments": 4}, {"cu_seqlens": torch.tensor([0, 3, 3, 4, 7])}))
        readings.append(({}, {**chunks, "reverse": "second_half"}))
    return readings


@pytest.mark.slow
@pytest.mark.parametrize("op", ["cumulative_softmax", "short_convolution"])
def test_a_frozen_input_changes_no_other_gradient_of_the_torch_form(op) -> None:
    """Each input is frozen alone, and trained alone."""
    for variant in find_structures(op):
        for of_inputs, options in list_readings(op, variant):
            call = functools.partial(
                differentiate,
                op,
                variant,
                run=functools.partial(run_torch, **options),
                **{"batch": 2, "tokens": 7, "dtype": torch.float64, **of_inputs},
            )
            whole = call(())
            for name in whole:
                for frozen in ((name,), tuple(whole.keys() - {name})):
                    rest = call(frozen)
                    assert rest.keys() == whole.keys() - set(frozen)
                    for other, gradient in rest.items():
                        assert torch.equal(gradient, whole[other]), (variant, options, frozen, other)
