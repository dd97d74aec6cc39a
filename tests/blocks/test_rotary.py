from __future__ import annotations

import torch

from longseq.blocks.rotary import rotary_angles, rotate_pairs


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
