"""Metrics of language models: sums of losses per token, per byte and by position in a document."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

# Positions are grouped by powers of two: 0, 1, 2 to 3, 4 to 7, ...; the last group has all from 2^30 on.
_PARTS = 32


def perplexity_of(loss: float) -> float:
    """The exponential of the mean loss of a token, infinite where no number is as large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class _SummedLoss(Metric):
    """A loss, summed over batches and processes, and its divisor; in float64, because there can be many tokens."""

    full_state_update = False
    higher_is_better = False

    total: Tensor
    count: Tensor

    def __init__(self, parts: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(parts, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(parts, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: Any) -> None:
        """Add a sum of losses over `count` tokens or bytes."""
        # Not in place: see `longseq.tasks.training.metrics.WeightedMean`.
        self.total = self.total + loss
        self.count = self.count + count

    def compute(self) -> Tensor:
        """The mean loss; NaN without tokens."""
        return self.total / self.count


class TokenLoss(_SummedLoss):
    """The mean loss of a token, in nats."""


class Perplexity(_SummedLoss):
    """The exponential of the mean loss of a token."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class BitsPerByte(_SummedLoss):
    """The negative log2 probability of the text by the model, per byte of the text."""

    def compute(self) -> Tensor:
        return super().compute() / math.log(2)


class LossByPosition(_SummedLoss):
    """The mean loss of tokens by position in the sequence that the model has read: 0, 1, 2 to 3, 4 to 7, ..."""

    def __init__(self) -> None:
        super().__init__((_PARTS,))

    def update(self, loss: Tensor, position: Tensor, counts: Tensor) -> None:  # type: ignore[override]
        """Add the losses of tokens at `position`, where `counts` is True; the three have one shape."""
        edges = 2 ** torch.arange(_PARTS - 1, device=position.device)
        part = torch.bucketize(position.flatten(), edges, right=True)
        self.total = self.total.index_add(0, part, (loss * counts).flatten().double())
        self.count = self.count.index_add(0, part, counts.flatten().double())

    def compute(self) -> Tensor:
        """`[2, parts]`: the mean losses and the numbers of tokens."""
        return torch.stack([self.total / self.count, self.count])

    def table(self) -> list[dict[str, Any]]:
        """Each group with tokens: its first and last position, the perplexity of its tokens and their number.

        All processes of a run call it together.
        """
        rows = []
        for part, (loss, count) in enumerate(self.compute().T.tolist()):
            if count:
                first, last = (2 ** (part - 1) if part else 0), 2**part - 1
                rows.append({"from": first, "to": last, "perplexity": perplexity_of(loss), "tokens": int(count)})
        return rows
