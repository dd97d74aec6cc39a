"""The tolerance of the self-test: in each head and chunk at most three times the error of the torch form.

A tensor is cut into blocks, and each block has its own relative error, ‖actual − exact‖ / ‖exact‖ over the block.
Rounding errors average out in such a norm; a wrong factor in one head or chunk does not. A tolerance relative to the
tensor's largest element would be too weak for half precision: the largest of 10⁵ random elements is four to five times
a usual one, and a kernel that is wrong by 6 % everywhere would pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 64  # tokens of a chunk, and the fewest elements of a block, where the tensor has as many
FACTOR = 3.0  # the allowed error, in multiples of the torch form's own error
# Relative errors that always pass. The torch form computes in float32 and rounds only its results. Kernels multiply in
# half precision, or in three products of TF32; one such product is off by 3e-4. Emulated kernels are off by up to 0.5 %
# in float16 and 0.9 % in bfloat16, in gradients of gates over 2,000 tokens. An error of 2 % fails, unless three times
# the torch form's error is larger.
FLOORS = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 1.2e-2}
# The norm of a block counts as at least SMALLEST times the median block's, because a sum that cancels keeps the
# rounding errors of its summands; and as at least TINY, because float32 is not precise below it.
SMALLEST, TINY = 1 / 16, 1e-30


class Block(NamedTuple):
    """The block of a tensor with the largest error relative to the allowed one."""

    error: float  # relative to the exact block
    allowed: float

    @property
    def share(self) -> float:
        """The error relative to the allowed one; infinite for NaN."""
        if self.error == 0:
            return 0.0
        share = self.error / self.allowed if self.allowed else float("inf")
        return share if share == share else float("inf")


class Bar(NamedTuple):
    """The allowed error of each block of a tensor, from the results of exact arithmetic and of the torch form."""

    exact: Tensor
    tokens: int
    sizes: Tensor  # norm of each exact block, at least as SMALLEST and TINY demand
    allowed: Tensor  # norm of the largest allowed error of each block

    @classmethod
    def of(cls, exact: Tensor, torch_result: Tensor, tokens: int, dtype: torch.dtype, factor: float = FACTOR) -> "Bar":
        """The bar for results in precision `dtype`, of `tokens` tokens. Integers must be equal."""
        if not exact.is_floating_point() or exact.numel() == 0:  # such as the state of a convolution of one tap
            return cls(exact, tokens, exact.new_zeros(0), exact.new_zeros(0))
        lengths, counts = _lengths(exact, tokens), _lengths(torch.ones_like(exact), tokens)
        usual = (lengths / counts).median()
        sizes = torch.maximum(lengths, SMALLEST * usual * counts).clamp_min(TINY)
        errors = _lengths(torch_result.detach().double() - exact, tokens)
        allowed = torch.maximum(factor * errors, FLOORS[dtype] * sizes)
        return cls(exact, tokens, sizes, allowed)

    def find_worst(self, actual: Tensor) -> Block:
        """The block of a result with the largest error relative to the allowed one."""
        assert actual.shape == self.exact.shape, f"shape {tuple(actual.shape)}, expected {tuple(self.exact.shape)}"
        if self.sizes.numel() == 0:
            return Block(0.0 if torch.equal(actual, self.exact) else float("inf"), 0.0)
        errors = _lengths(actual.detach().double() - self.exact, self.tokens)
        worst = int((errors / self.allowed).nan_to_num(float("inf")).argmax())  # NaN fails
        size = self.sizes[worst].item()
        return Block(errors[worst].item() / size, self.allowed[worst].item() / size)


def _lengths(x: Tensor, tokens: int) -> Tensor:
    """L2 norms of the blocks of x.

    The blocks of [B, T, H, ...] are by row, chunk and head; those of [B, T, D] by row, chunk and channel; those of a
    state [B, H, ...] by row and head. Neighbouring heads with few elements share a block. A parameter has one row.
    """
    squares = x.detach().double().square()
    if x.ndim > 1 and x.shape[1] == tokens:
        columns = squares if x.ndim > 2 else squares.unsqueeze(-1)
        chunks = columns.tensor_split(max(1, tokens // LEAST), dim=1)
        return torch.cat([_sum_blocks(chunk.movedim(1, -1)) for chunk in chunks]).sqrt()
    return _sum_blocks(squares if x.ndim > 2 else squares[None]).sqrt()


def _sum_blocks(squares: Tensor) -> Tensor:
    """Sums of [B, H, ...] over all but row and head; neighbouring heads together until they have `LEAST` elements."""
    sums = squares.flatten(2).sum(-1) if squares.ndim > 2 else squares
    together = -(-LEAST * sums.numel() // squares.numel())
    return torch.cat([part.sum(1) for part in sums.split(together, dim=1)])
