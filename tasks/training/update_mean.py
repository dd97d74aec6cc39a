"""The mean of a loss over all targets of an update whose batches may differ in their number of targets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from longseq.blocks.sharding import own_part


class UpdateMean:
    """Weights the batches of an update by their numbers of targets, over accumulated batches and processes.

    Lightning divides a loss by the number of accumulated batches, and processes average their gradients. So a batch
    with few targets would count as much as one with many. Here a loss is a sum over targets. `scale` divides it by the
    mean number of targets, over processes, in the first batches of the update. All targets of the update are known with
    its last batch: `correct` then multiplies the gradients by the factor that is missing.

    All processes of the run call the methods in this order for each batch. Counts stay on the device, for which nothing
    waits; processes sum them during the forward pass.
    """

    def __init__(self) -> None:
        self._own: Any = None  # the targets of this process in the update so far
        self._expected: Any = None  # the targets of a batch, estimated from the first batches of the update
        self._total: Any = None  # the targets of the first batches, later of the update, over all processes
        self._sum: Any = None  # the sum of the losses of this process in the update so far
        self._work: Any = None

    def begin(self, targets: Tensor, *, first: bool, last: bool) -> None:
        """Count the targets of a batch, a whole number `[]`; it may be the `first` and the `last` of its update."""
        self._own = targets if first else self._own + targets
        if first:
            self._expected = self._sum = None
        if first or last:
            self._total = self._own.clone()
            if _processes() > 1:
                self._work = distributed.all_reduce(self._total, async_op=True)

    def scale(self, loss: Tensor) -> Tensor:
        """The result of a training step, from the loss `[]` summed over the targets of its batch."""
        if self._expected is None:
            self._expected = self._finish_total() / _processes()
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        return loss / self._expected

    @property
    def own_mean(self) -> Tensor:
        """The mean over this process's targets of the update so far, without a gradient."""
        return self._sum / self._own.clamp(min=1)

    @torch.no_grad()
    def correct(self, parameters: Iterable[Tensor], accumulate: int) -> None:
        """Turn the gradients of a whole update into those of the mean; Lightning divided by `accumulate`."""
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
