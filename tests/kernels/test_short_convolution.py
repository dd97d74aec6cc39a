"""What only the short convolution has: a mask, and activations."""

import pytest
import torch
from kernel_inputs import assert_equal_up_to_rounding, gradients, list_variants, make_inputs

from longseq.kernels import short_convolution


@pytest.fixture(params=["right", "left", "holes", "nothing", "everything"])
def mask(request):
    tokens = torch.arange(9)
    return {
        "right": tokens < torch.tensor([[9], [4], [1]]),
        "left": tokens >= torch.tensor([[0], [4], [8]]),
        "holes": torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) < 0.5,
        "nothing": torch.ones(3, 9, dtype=torch.bool),
        "everything": torch.zeros(3, 9, dtype=torch.bool),
    }[request.param]


@pytest.mark.parametrize("variant", list_variants("short_convolution"))
def test_masked_tokens_are_passed_over(mask, variant):
    inputs = make_inputs("short_convolution", variant, batch=3, tokens=9)
    output, state = inputs.run(mask=mask)
    for row in range(3):
        alone = inputs.map(lambda x, row=row: x[row : row + 1] if x.dim() == 3 else x)
        expected = torch.zeros_like(output[row])
        expected_state = inputs.initial_state[row]
        if mask[row].any():
            alone = alone.cut(0, 9)
            alone.sequences["x"] = alone.sequences["x"][:, mask[row]]
            real, expected_state = alone.run()
            expected[mask[row]], expected_state = real[0], expected_state[0]
        assert_equal_up_to_rounding(output[row], expected, "output")
        assert_equal_up_to_rounding(state[row], expected_state, "final state")


def test_gradients_of_masked_input_equal_the_recurrence(mask):
    inputs = make_inputs("short_convolution", "silu", batch=3, tokens=9)
    expected = gradients(inputs, backend="reference", mask=mask)
    for name, value in gradients(inputs, mask=mask).items():
        assert_equal_up_to_rounding(value, expected[name], name)


@pytest.mark.parametrize("own", [False, True])
def test_a_mask_of_rows_read_both_ways(mask, own):
    inputs = make_inputs("short_convolution", "silu", batch=3, tokens=9)
    if own:
        inputs, rows = inputs.with_own_parameters(), mask
    else:
        inputs = make_inputs("short_convolution", "silu", batch=6, tokens=9)
        rows = torch.cat((mask, mask.flip(0)))
    weights = inputs.parameters["weight"] if own else inputs.parameters["weight"].expand(2, -1, -1)
    bias = inputs.parameters["bias"] if own else inputs.parameters["bias"].expand(2, -1)
    for backend in ("torch", "reference"):
        y, state = inputs.run(mask=rows, reverse="second_half", backend=backend)
        for i, (half, last) in enumerate(zip(y.chunk(2), state.chunk(2), strict=True)):
            x = inputs.sequences["x"] if own else inputs.sequences["x"].chunk(2)[i]
            expected, expected_last = short_convolution(
                x,
                weights[i],
                bias[i],
                activation="silu",
                initial_state=inputs.initial_state.chunk(2)[i],
                output_final_state=True,
                mask=rows if own else rows.chunk(2)[i],
                reverse=bool(i),
            )
            assert_equal_up_to_rounding(half, expected, "output")
            assert_equal_up_to_rounding(last, expected_last, "final state")


def test_garbage_behind_the_mask_reaches_nothing(mask):
    inputs = make_inputs("short_convolution", batch=3, tokens=9)
    inputs.sequences["x"][~mask] = torch.nan
    assert all(value.isfinite().all() for value in gradients(inputs, mask=mask).values())
