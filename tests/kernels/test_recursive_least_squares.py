"""What the contracts leave open: the inverse itself, the refresh, padding, and ill-conditioned inputs."""

import pytest
import torch
from kernel_inputs import assert_equal_up_to_rounding, make_inputs

from longseq.kernels import recursive_least_squares, recursive_least_squares_step

BACKENDS = ["torch", "reference"]


def draw(batch=2, tokens=30, heads=2, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, u = torch.randn(2, batch, tokens, heads, width, generator=generator, dtype=torch.float64).to(dtype)
    return x, u


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_refresh_it_multiplies_by_the_inverse_of_a_sum(backend):
    x, u = draw()
    y, state = recursive_least_squares(
        x, u, lambda0=0.3, refresh_period=0, output_final_state=True, backend=backend, chunk_size=8
    )
    sums = 0.3 * torch.eye(4).double() + (u.unsqueeze(-1) * u.unsqueeze(-2)).cumsum(1)
    assert_equal_up_to_rounding(y, torch.linalg.solve(sums, x), "y")
    assert_equal_up_to_rounding(state[0], torch.linalg.inv(sums[:, -1]), "A")
    assert state[1].tolist() == [30, 30]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_refresh_falls_due_by_the_steps_of_each_row(backend):
    """With u = 0 nothing but the refresh moves A, so y counts the refreshes."""
    x, u = torch.ones(3, 45, 1, 1).double(), torch.zeros(3, 45, 1, 1).double()
    steps = torch.tensor([0, 13, 1999])
    state = torch.ones(3, 1, 1, 1).double(), steps
    y, (_, after) = recursive_least_squares(
        x, u, refresh=0.5, initial_state=state, output_final_state=True, backend=backend
    )
    position = steps[:, None] + torch.arange(1, 46)
    due = position // 20 - steps[:, None] // 20
    assert_equal_up_to_rounding(y[..., 0, 0], 1 + 0.5 * due.double(), "y")
    assert torch.equal(after, steps + 45)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("refresh_period", [None, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_anywhere_is_as_if_it_were_not_there(backend, refresh_period, packed):
    inputs = make_inputs("recursive_least_squares", batch=1, tokens=29)
    mask = torch.rand(1, 29, generator=torch.Generator().manual_seed(1)) < 0.6
    real = mask[0]
    options = {
        "refresh_period": refresh_period,
        "refresh": 0.05,
        "initial_state": inputs.initial_state,
        "output_final_state": True,
        "backend": backend,
        "chunk_size": 4,
        "cu_seqlens": torch.tensor([0, 29]) if packed else None,
    }
    given = {name: x.masked_fill(~mask[..., None, None], torch.nan) for name, x in inputs.sequences.items()}
    given = {name: x.requires_grad_() for name, x in given.items()}
    y, state = recursive_least_squares(**given, mask=mask, **options)
    assert not y[:, ~real].any()
    alone = {name: x[:, real].requires_grad_() for name, x in inputs.sequences.items()}
    options["cu_seqlens"] = None
    expected, expected_state = recursive_least_squares(**alone, **options)
    assert_equal_up_to_rounding(y[:, real], expected, "y")
    assert_equal_up_to_rounding(state[0], expected_state[0], "A")
    assert torch.equal(state[1], expected_state[1])
    (y.square().sum() + state[0].square().sum()).backward()
    (expected.square().sum() + expected_state[0].square().sum()).backward()
    for name, x in given.items():
        assert_equal_up_to_rounding(x.grad[:, real], alone[name].grad, f"gradient of {name}")
        assert not x.grad[:, ~real].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_A_stays_symmetric_and_positive_definite_in_float32(backend):
    """The same direction for 2,000 tokens: its eigenvalue falls to 5e-4 while the others stay at 10."""
    x, u = draw(batch=1, tokens=1, width=8, dtype=torch.float32)
    u = torch.nn.functional.normalize(u, dim=-1).expand(1, 2000, 2, 8)
    _, (A, _) = recursive_least_squares(
        x.expand_as(u), u, refresh_period=0, output_final_state=True, backend=backend, chunk_size=32
    )
    assert torch.equal(A, A.mT)
    eigenvalues = torch.linalg.eigvalsh(A.double()).float()
    assert eigenvalues[..., 0].min() > 0
    assert_equal_up_to_rounding(eigenvalues[..., 1:], torch.full_like(eigenvalues[..., 1:], 10.0), "others")


def test_of_a_given_A_the_symmetric_part_is_used():
    x, u = draw(tokens=3)
    A, steps = torch.randn(2, 2, 4, 4).double() / 10 + torch.eye(4), torch.zeros(2, dtype=torch.int64)
    expected, _ = recursive_least_squares(x, u, initial_state=((A + A.mT) / 2, steps))
    y, _ = recursive_least_squares(x, u, initial_state=(A, steps))
    assert_equal_up_to_rounding(y, expected, "y")
    y, _ = recursive_least_squares_step(x[:, 0], u[:, 0], (A, steps))
    assert_equal_up_to_rounding(y, expected[:, 0], "step")
