"""Convolved features equal the short convolution followed by the features of heads, with each option of both."""

import pytest
import torch
from kernel_inputs import assert_accurate, assert_equal_up_to_rounding, error, gradients, make_inputs
from torch import Tensor

from longseq.kernels import convolved_features, head_features, short_convolution

MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
WAYS = {
    "dense": {},
    "packed": {"cu_seqlens": torch.tensor([0, 2, 2, 9])},
    "masked": {"mask": MASK},
    "reversed": {"reverse": True},
    "packed_reversed": {"cu_seqlens": torch.tensor([0, 2, 2, 9]), "reverse": True},
    "masked_reversed": {"mask": MASK, "reverse": True},
    "second_half": {"reverse": "second_half"},
    "pair": {"reverse": "second_half"},
    "masked_pair": {"mask": MASK, "reverse": "second_half"},
}


def draw(way="dense", variant="plain", dtype=torch.float64, tokens=9, with_state=True, **options):
    segments = 3 if "packed" in way else None
    inputs = make_inputs("convolved_features", variant, tokens=tokens, segments=segments, dtype=dtype, **options)
    inputs = inputs.with_own_parameters() if "pair" in way else inputs
    return inputs if with_state else inputs.replace({"initial_state": torch.zeros_like(inputs.initial_state)})


def call_two(inputs, backend="torch", **options):
    """Output and final state of the two operations in succession."""
    (x, weight), heads = (inputs.sequences["x"], inputs.parameters["weight"]), inputs.options["num_heads"]
    mixed, logits, _ = x.split([weight.shape[-2], heads, 2], dim=-1)
    y, state = short_convolution(
        mixed, weight, initial_state=inputs.initial_state, output_final_state=True, backend=backend, **options
    )
    features = head_features(y, logits=logits, backend=backend, **inputs.options)
    return torch.cat([part.flatten(2) for part in features], -1), state


@pytest.mark.parametrize("variant", ["plain", "elu_plus_one", "l1"])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_two_operations(way, variant):
    inputs = draw(way, variant)
    expected = gradients(inputs, run=call_two, **WAYS[way])
    for name, value in gradients(inputs, **WAYS[way]).items():
        assert_equal_up_to_rounding(value, expected[name], name)


# Each way of reading, with or without a state.
OF_THE_KERNEL = [("dense", False), *((way, True) for way in ("packed_reversed", "second_half", "masked_pair"))]


@pytest.mark.parametrize(("way", "with_state"), OF_THE_KERNEL)
@pytest.mark.slow
def test_the_kernel_is_two_operations(interpreted, way, with_state):
    options = WAYS[way] if with_state else {"initial_state": None, **WAYS[way]}
    inputs, exact = (draw(way, dtype=dtype, with_state=with_state) for dtype in (torch.float32, torch.float64))
    expected, plain = (gradients(x, run=call_two, **WAYS[way]) for x in (exact, inputs))
    for name, value in gradients(inputs, backend="triton", **options).items():
        if with_state or name != "gradient of initial_state":
            assert_accurate(value, plain[name], expected[name], name)


@pytest.mark.slow
def test_the_kernel_of_odd_widths_over_several_stretches(interpreted):
    options = {"initial_state": None, "cu_seqlens": torch.tensor([0, 3, 25, 27]), "reverse": True}
    sizes = {"H": 1, "K": 130, "V": 3, "W": 2}
    inputs = draw("packed_reversed", dtype=torch.float32, batch=1, tokens=27, sizes=sizes)
    exact, plain = gradients(inputs.map(Tensor.double), **options), gradients(inputs, backend="torch", **options)
    for name, value in gradients(inputs, backend="triton", **options).items():
        assert_accurate(value, plain[name], exact[name], name)


@pytest.mark.parametrize(("way", "backend"), [("packed", "torch"), ("dense", "triton"), ("pair", "triton")])
def test_channels_behind_the_logits_are_ignored(interpreted, way, backend):
    inputs = draw(way, dtype=torch.float32, batch=1, sizes={"H": 1})
    inputs.sequences["x"][..., -2:] = torch.nan
    actual = gradients(inputs, backend=backend, **WAYS[way])
    assert all(value.isfinite().all() for value in actual.values())
    assert not actual["gradient of x"][..., -2:].any()
    bare = inputs.replace({"x": inputs.sequences["x"][..., :-2]})
    assert_equal_up_to_rounding(bare.run(**WAYS[way])[0], inputs.run(**WAYS[way])[0], "output")


@pytest.mark.parametrize(("way", "variant"), [("dense", "l1"), ("pair", "plain")])
def test_tokens_of_zero_have_bounded_gradients(interpreted, way, variant):
    """Four zero tokens fill the window of the convolution. With silu, each gradient is multiplied by 500 there."""
    inputs = draw(way, variant, dtype=torch.float32, with_state=False, batch=1, sizes={"H": 1})
    inputs.sequences["x"][:, 2:6] = 0
    options = {"initial_state": None, **WAYS[way]}
    exact, plain = gradients(inputs.map(Tensor.double), **options), gradients(inputs, backend="torch", **options)
    for name, value in gradients(inputs, backend="triton", **options).items():
        assert value.abs().max() < 1e5, name
        assert_accurate(value, plain[name], exact[name], name)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_masked_tokens_have_the_features_of_zero(interpreted, backend):
    inputs = draw(variant="elu_plus_one", dtype=torch.float32)
    q, k, v, beta, _ = convolved_features(
        inputs.sequences["x"], inputs.parameters["weight"], mask=MASK, backend=backend, **inputs.options
    )
    for unit in (q[~MASK], k[~MASK]):
        torch.testing.assert_close(unit, torch.full_like(unit, 5**-0.5))
    assert not v[~MASK].any()
    torch.testing.assert_close(beta, inputs.sequences["x"][..., -4:-2].sigmoid())


@pytest.mark.parametrize(
    ("way", "dtype", "backend"), [("dense", torch.bfloat16, "torch"), ("masked", torch.float16, "triton")]
)
def test_precisions(interpreted, way, backend, dtype):
    inputs = draw(way, dtype=dtype)
    inputs = inputs.replace({"weight": inputs.parameters["weight"].float()})
    *features, beta, state = convolved_features(
        inputs.sequences["x"], inputs.parameters["weight"], output_final_state=True, backend=backend,
        **inputs.options, **WAYS[way],
    )  # fmt: skip
    assert {part.dtype for part in features} == {dtype}
    assert beta.dtype == state.dtype == torch.float32
    exact = gradients(inputs.map(Tensor.double), **WAYS[way])
    for name, value in gradients(inputs, backend=backend, **WAYS[way]).items():
        # The interpreter truncates bfloat16, where a GPU rounds; masked rows are rounded between the two operations.
        assert error(value, exact[name]) <= 4 * torch.finfo(dtype).eps, name
