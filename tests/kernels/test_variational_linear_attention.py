"""Properties of the recurrence: special cases, its transitions and the size of its memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import assert_equal_up_to_rounding, gradients, make_inputs

from longseq.kernels import (
    delta_rule,
    linear_attention,
    recursive_least_squares,
    variational_linear_attention,
)

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


@pytest.mark.parametrize(("cosine", "norm"), [(1.0, 1.0), (0.9, 1.0916), (0.0, math.sqrt((3 + math.sqrt(5)) / 2))])
def test_a_step_has_spectral_radius_one_but_not_spectral_norm_one(cosine, norm):
    alpha, key = torch.tensor([cosine, math.sqrt(1 - cosine**2), 0.0]), torch.tensor([1.0, 0.0, 0.0])
    step = torch.eye(3) - torch.outer(alpha, key)
    assert torch.linalg.eigvals(step).abs().max().item() == pytest.approx(1, abs=1e-6)
    assert torch.linalg.matrix_norm(step, 2).item() == pytest.approx(norm, abs=1e-4)
    formula = ((3 - 2 * cosine) + math.sqrt((3 - 2 * cosine) ** 2 - 4 * (1 - cosine) ** 2)) / 2
    assert math.sqrt(formula) == pytest.approx(norm, abs=1e-4)


def test_the_steps_of_a_run_are_not_all_contractions():
    """The eigenvalues are in [0, 1], but the spectral norm, which the paper states to be 1, exceeds 1."""
    _, k, _, u = draw(tokens=100, width=16)
    k = F.normalize(k, dim=-1)
    alpha, _ = recursive_least_squares(k, u)
    write = F.normalize(alpha, dim=-1)
    cosine = (write * k).sum(-1)
    assert cosine.min() > 0
    assert cosine.max() <= 1 + 1e-12
    steps = torch.eye(16) - write.unsqueeze(-1) * k.unsqueeze(-2)
    assert torch.linalg.eigvals(steps).abs().max() < 1 + 1e-6
    norms = torch.linalg.matrix_norm(steps, 2)
    assert norms.min() > 1 - 1e-12
    assert norms.median() > 1.05
    assert norms.max() < math.sqrt((3 + math.sqrt(5)) / 2), "the bound for cosines above 0"


def test_the_memory_stays_far_below_that_of_linear_attention():
    q, k, v, u = draw(tokens=1000, width=16, dtype=torch.float32)
    _, added = linear_attention(q, k, v, output_final_state=True)
    _, half = variational_linear_attention(q[:, :500], k[:, :500], v[:, :500], u[:, :500], output_final_state=True)
    _, state = variational_linear_attention(q, k, v, u, output_final_state=True)
    size, size_half, size_added = (torch.linalg.matrix_norm(x).mean() for x in (state[0], half[0], added))
    assert 20 * size < size_added
    assert size < 1.5 * size_half, "it does not grow with the sequence"
    assert torch.linalg.eigvalsh(state[1]).min() > 0


def test_memory_without_alpha_normalised_overflows():
    q, k, v, u = draw(tokens=400, width=16, dtype=torch.float32)
    _, state = variational_linear_attention(q, k, v, u / 4, normalize_alpha=False, output_final_state=True)
    assert not torch.linalg.matrix_norm(state[0]).mean() < 1e6
