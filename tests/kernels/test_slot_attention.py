"""Slot attention and the cumulative softmax, compared with their formulas."""

import pytest
import torch
from kernel_inputs import assert_equal_up_to_rounding, gradients, make_inputs

from longseq.kernels import cumulative_softmax, linear_attention, slot_attention
from longseq.kernels.slot_attention import ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_the_recurrence(activation):
    inputs = make_inputs("slot_attention", tokens=21)
    expected = gradients(inputs, backend="reference", activation=activation)
    for name, value in gradients(inputs, backend="torch", activation=activation, chunk_size=8).items():
        assert_equal_up_to_rounding(value, expected[name], name)


def test_the_default_write_makes_a_weighted_average():
    sequences = make_inputs("slot_attention").sequences
    q, k, v, g = (sequences[name] for name in "qkvg")
    given, _ = slot_attention(q, k, v, g, write=1 - g.exp())
    assert_equal_up_to_rounding(slot_attention(q, k, v, g)[0], given, "output")
    ones, _ = slot_attention(q, k, torch.ones_like(v), torch.cat((torch.full_like(g[:, :1], -1e4), g[:, 1:]), 1))
    assert_equal_up_to_rounding(ones, torch.ones_like(ones), "average of ones")


def test_a_weak_write_is_not_lost_in_float32():
    """1 - e^g computed from e^g would be 0: next to 1, rounding leaves nothing of 1e-9."""
    q = torch.ones(1, 4, 1, 1)
    g = torch.full((1, 4, 1, 2), -1e-9)
    o, _ = slot_attention(q, q, q, g)
    torch.testing.assert_close(o[0, :, 0, 0], 1e-9 * torch.arange(1.0, 5.0))


def test_a_value_gate_is_a_key_gate_of_the_transposed_state():
    """oᵀ x = xᵀ Sᵀ q: reading S at q and its transpose at x gives the same number."""
    inputs = make_inputs("linear_attention", "value_gated")
    x = torch.randn(inputs.sequences["v"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    q, k, v, g = (inputs.sequences[name] for name in ("q", "k", "v", "g_value"))
    o, final = linear_attention(q, k, v, g_value=g, output_final_state=True)
    transposed, final_transposed = linear_attention(x, v, k, g=g, output_final_state=True)
    assert_equal_up_to_rounding((o * x).sum(-1), (transposed * q).sum(-1), "bilinear form")
    assert_equal_up_to_rounding(final, final_transposed.mT, "state")


def test_cumulative_softmax_is_a_softmax_over_all_tokens_so_far():
    x = make_inputs("cumulative_softmax", tokens=20).sequences["x"]
    g, final = cumulative_softmax(x, output_final_state=True)
    assert_equal_up_to_rounding(final, x.logsumexp(1), "normaliser")
    for t in range(x.shape[1]):
        share = x[:, : t + 1].softmax(1)[:, -1]
        assert_equal_up_to_rounding(-torch.expm1(g[:, t]), share, f"share of token {t}")


def test_a_token_that_hardly_counts_is_not_lost_in_float32():
    x = torch.tensor([0.0, -30.0]).reshape(1, 2, 1, 1)
    g, _ = cumulative_softmax(x)
    torch.testing.assert_close(-g[0, 1, 0, 0], torch.tensor(-30.0).exp())
