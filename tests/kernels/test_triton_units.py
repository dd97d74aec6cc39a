"""What all Triton kernels share: numbers as the operands of matrix products."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402


def round_numbers(x, y, ROUNDED: tl.constexpr):
    from longseq.kernels.triton_units import to_tf32

    i = tl.arange(0, 8)
    tl.store(y + i, to_tf32(tl.load(x + i), ROUNDED))


def test_numbers_are_rounded_to_tf32(interpreted):
    # The NaN of a GPU, the same with a sign, the NaN of a processor; 1 and its neighbours; an infinity.
    bits = [0x7FFFFFFF, -1, 0x7FC00000, 0x3F800000, 0x3F800FFF, 0x3F801000, 0x3F803000 - 2**31, 0x7F800000]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    y = torch.empty_like(x)
    kernel = triton.jit(round_numbers)
    kernel[(1,)](x, y, True)
    assert not y[[0, 1, 2, 7]].isfinite().any()
    assert y[:3].isnan().all()
    assert y[3:7].tolist() == [1, 1, 1 + 2**-10, -1 - 2**-9]
    kernel[(1,)](x, y, False)
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))
