from __future__ import annotations

import torch

from longseq.blocks.rotary import count_positions, rotary_angles, rotate_pairs


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_pairs_turn_as_complex_numbers_do() -> None:
    x, positions = draw(2, 7, 3, 8), torch.arange(5, 12)
    frequency = 100.0 ** -torch.arange(0, 1, 0.25, dtype=torch.float64)
    angle = positions[:, None, None] * frequency
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    actual = rotate_pairs(x, *rotary_angles(x, positions, base=100.0))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_positions_count_on_from_a_start() -> None:
    x = torch.zeros(2, 3, 1)
    assert [p.tolist() for p in count_positions(x)] == [[[0, 1, 2], [0, 1, 2]], [3, 3]]
    carried = count_positions(x, torch.tensor([4, 10]))
    assert [p.tolist() for p in carried] == [[[4, 5, 6], [10, 11, 12]], [7, 13]]


def test_padding_is_not_counted() -> None:
    real = torch.tensor([[False, False, True, True], [True, True, False, False]])
    positions, following = count_positions(torch.zeros(2, 4, 1), torch.tensor([5, 0]), mask=real)
    assert positions[real].tolist() == [5, 6, 0, 1]
    assert following.tolist() == [7, 2]


def test_packed_sequences_count_alone() -> None:
    borders = torch.tensor([0, 2, 2, 5])
    positions, following = count_positions(torch.zeros(1, 5, 1), cu_seqlens=borders)
    assert positions.tolist() == [[0, 1, 0, 1, 2]]
    assert following.tolist() == [2, 0, 3]
    start = torch.tensor([10, 20, 30])
    positions, following = count_positions(torch.zeros(1, 5, 1), start, cu_seqlens=borders)
    assert positions.tolist() == [[10, 11, 30, 31, 32]]
    assert following.tolist() == [12, 20, 33]
    positions, following = count_positions(torch.zeros(1, 5, 1), start, cu_seqlens=borders, reverse=True)
    assert positions.tolist() == [[11, 10, 32, 31, 30]]
    assert following.tolist() == [12, 20, 33]


def test_positions_count_in_the_order_of_reading() -> None:
    x, start = torch.zeros(2, 4, 1), torch.tensor([5, 0])
    real = torch.tensor([[False, False, True, True], [True, True, False, False]])
    assert [p.tolist() for p in count_positions(x, reverse="second_half")] == [[[0, 1, 2, 3], [3, 2, 1, 0]], [4, 4]]
    positions, following = count_positions(x, start, mask=real, reverse=True)
    assert positions[real].tolist() == [6, 5, 1, 0]
    assert following.tolist() == [7, 2]
