"""The parts of the chunk forms, with inputs for which simpler ways of computing them fail."""

import torch
from cases import cases
from kernel_inputs import assert_accurate, assert_equal_up_to_rounding

from longseq.kernels.chunks import decay_matrix, decayed_products, decayed_sums, unit_lower_inverse


def gram(kind, size, beta, width=64):
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(3, size, width, generator=generator, dtype=torch.float64)
    if kind == "correlated":
        k = k[:, :1] + 0.3 * k
    elif kind == "identical":
        k = k[:, :1].expand_as(k)
    k = torch.nn.functional.normalize(k, dim=-1)
    return (beta * k @ k.mT).tril(-1)


@cases("kind", ["random", "correlated", "identical"])
@cases("beta", [0.5, 1.0, 2.0])
@cases("size", [1, 2, 16, 64, 128])
def test_inverse_is_as_accurate_as_a_triangular_solve(kind, beta, size):
    strict = gram(kind, size, beta)
    exact = torch.linalg.solve_triangular(
        strict, torch.eye(size).double().expand_as(strict), upper=False, unitriangular=True
    )
    eye = torch.eye(size).expand(strict.shape)
    peer = torch.linalg.solve_triangular(strict.float(), eye, upper=False, unitriangular=True)
    assert_accurate(unit_lower_inverse(strict.float()), peer, exact, "inverse")


def test_a_great_decay_leaves_small_ones_after_it_exact():
    """A difference of prefix sums would lose the small decays after the strong one."""
    g = torch.full((1, 64, 1), -0.01)
    g[:, 20] = -1e6
    after = decay_matrix(g)[0, 63, 21]
    assert_equal_up_to_rounding(after, torch.tensor(-0.01 * 42).exp(), "decay")
    one = torch.ones(1, 64, 1)
    assert_equal_up_to_rounding(decayed_products(one, one, g)[0, 63, 21], after, "product")
    assert_equal_up_to_rounding(decayed_sums(only_token(64, 21), one, g)[0, 63, 0], after, "sum")


def test_a_gate_of_minus_infinity_forgets():
    g = torch.zeros(1, 8, 1)
    g[:, 3] = -torch.inf
    expected = torch.ones(8, 8).tril()
    expected[3:, :3] = 0
    one = torch.ones(1, 8, 1)
    assert torch.equal(decay_matrix(g)[0], expected)
    assert torch.equal(decayed_products(one, one, g)[0], expected)
    for token in range(8):
        assert torch.equal(decayed_sums(only_token(8, token), one, g)[0, :, 0], expected[:, token])


def only_token(size, token):
    """Weights that read one token [1, C, C]."""
    weights = torch.zeros(1, size, size)
    weights[:, :, token] = 1
    return weights
