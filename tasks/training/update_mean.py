"""The mean of a loss over all targets of an update, whose batches may differ in their number of targets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from longseq.blocks.sharding import own_part


class UpdateMean:
    """Weighs the batches of an update by their targets, over accumulated batches and processes.

    Lightning divides a loss by the number of accumulated batches, and processes average their gradients. A batch with
    few targets would therefore count as much as one with many. Here a loss is a sum over targets, and `scale` divides
    it by the targets that the first batches of the update have on average over the processes. All targets of the
    update are counted with its last batch: `correct` then multiplies the gradients by what the division missed.

    The methods are called in this order for each batch, by all processes of the run. Counts stay on the device, which
    nothing waits for; processes add them up during the forward pass.
    """

    def __init__(self) -> None:
        self._own: Any = None  # targets of this process in the update so far
        self._expected: Any = None  # targets of a batch, as the first batches of the update tell
        self._total: Any = None  # targets of the first batches, later of the update, over all processes
        self._sum: Any = None  # of the losses of this process in the update so far
        self._work: Any = None

    def begin(self, targets: Tensor, *, first: bool, last: bool) -> None:
        """Count the targets of a batch, a whole number `[]`, which is the `first` or `last` of an update, or both."""
        self._own = targets if first else self._own + targets
        if first:
            self._expected = self._sum = None
        if first or last:
            self._total = self._own.clone()
            if _processes() > 1:
                self._work = distributed.all_reduce(self._total, async_op=True)

    def scale(self, loss: Tensor) -> Tensor:
        """What a training step returns, of the loss `[]` summed over the targets of its batch."""
        if self._expected is None:
            self._expected = self._finish_total() / _processes()
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        return loss / self._expected

    @property
    def own_mean(self) -> Tensor:
        """The mean over the targets that this process has had of the update so far, without a gradient."""
        return self._sum / self._own.clamp(min=1)

    @torch.no_grad()
    def correct(self, parameters: Iterable[Tensor], accumulate: int) -> None:
        """Make the gradients of a whole update those of the mean; `accumulate` is by how much Lightning divided."""
        gradients = [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._expected * accumulate * _processes() / self._finish_total())

    def _finish_total(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total.clamp(min=1)


def _processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
