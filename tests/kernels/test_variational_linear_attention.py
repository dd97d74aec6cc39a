"""Properties of the recurrence: special cases, its transitions and the size of its memory."""

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import assert_equal_up_to_rounding, gradients, make_inputs

from longseq.kernels import delta_rule, variational_linear_attention

BACKENDS = ["torch", "reference"]


def draw(tokens=30, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v, u = torch.randn(4, 2, tokens, 2, width, generator=generator, dtype=dtype)
    return F.elu(q) + 1, F.elu(k) + 1, v, F.normalize(u, dim=-1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_penalties_along_the_keys_give_ridge_regression(backend):
    """Without α's normalisation and with u = k̂, it is recursive least squares: S solves a regression on all tokens."""
    q, k, v, _ = draw()
    k = F.normalize(k, dim=-1)
    options = {"lambda0": 0.3, "refresh_period": None, "normalize_alpha": False, "normalizer": False}
    o, state = variational_linear_attention(q, k, v, k, output_final_state=True, backend=backend, **options)
    gram = 0.3 * torch.eye(4).double() + (k.unsqueeze(-1) * k.unsqueeze(-2)).cumsum(1)
    memory = torch.linalg.solve(gram, (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1))
    assert_equal_up_to_rounding(state[0], memory[:, -1], "S")
    assert_equal_up_to_rounding(o, (q.unsqueeze(-2) @ memory).squeeze(-2), "o")


def test_a_fixed_A_gives_the_delta_rule():
    q, k, v, _ = draw()
    expected, memory = delta_rule(q, F.normalize(k, dim=-1), v, torch.ones(2, 30, 2).double(), output_final_state=True)
    o, state = variational_linear_attention(q, k, v, normalizer=False, output_final_state=True)
    assert_equal_up_to_rounding(o, expected, "o")
    assert_equal_up_to_rounding(state[0], memory, "S")
    assert torch.equal(state[1], 10 * torch.eye(4).double().expand(2, 2, 4, 4))


def test_the_normaliser_is_the_sum_of_the_keys():
    q, k, v, u = draw()
    plain, _ = variational_linear_attention(q, k, v, u, normalizer=False)
    sums = (k.cumsum(1) * q).sum(-1, keepdim=True)
    assert_equal_up_to_rounding(variational_linear_attention(q, k, v, u)[0], plain / sums, "o")
    limit = sums.median().item()
    o, _ = variational_linear_attention(q, k, v, u, eps=limit)
    assert_equal_up_to_rounding(o, plain / sums.clamp_min(limit), "o")


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_anywhere_is_as_if_it_were_not_there(backend):
    inputs = make_inputs("variational_linear_attention", batch=1, tokens=29)
    real = torch.rand(29, generator=torch.Generator().manual_seed(1)) < 0.6
    options = {**inputs.options, "initial_state": inputs.initial_state, "output_final_state": True, "backend": backend}
    o, state = variational_linear_attention(**inputs.sequences, mask=real[None], **options)
    alone = {name: x[:, real] for name, x in inputs.sequences.items()}
    expected, expected_state = variational_linear_attention(**alone, **options)
    assert_equal_up_to_rounding(o[:, real], expected, "o")
    for actual, value in zip(state, expected_state, strict=True):
        assert_equal_up_to_rounding(actual, value, "state")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_key_writes_nothing_and_has_a_gradient_of_ordinary_size(backend):
    inputs = make_inputs("variational_linear_attention", tokens=9, dtype=torch.float32)
    k = inputs.sequences["k"].clone()
    k[:, 4] = 0
    inputs = inputs.replace({"k": k})
    before, after = (inputs.cut(0, stop).run(backend=backend)[1][0] for stop in (4, 5))
    assert_equal_up_to_rounding(after, before, "S")
    for name, value in gradients(inputs, backend=backend).items():
        assert value.abs().max() < 1e3, name
