"""Sums and means over the accumulated batches of an update and over processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from longseq.blocks.sharding import own_part


class UpdateSum:
    """A sum over the accumulated batches of an update and over processes. It stays on the device."""

    def __init__(self) -> None:
        self._own: Any = None  # the sum of this process

    def add(self, value: Tensor, *, first: bool) -> None:
        """Add the number `[]` of a batch, which may be the `first` one of its update."""
        value = value.detach()
        self._own = value.clone() if first else self._own + value

    def find(self) -> Tensor | None:
        """The sum `[]`, after the last batch of the update; None before any. All processes call it together."""
        if self._own is None or count_processes() == 1:
            return self._own
        total = self._own.clone()
        distributed.all_reduce(total)
        return total


class UpdateMean:
    """The mean of a loss over all targets of an update whose batches may differ in their number of targets.

    Lightning divides a loss by the number of accumulated batches, and processes average their gradients. So a batch
    with few targets would count as much as one with many. Here a loss is a sum over targets. `scale` divides it by the
    mean number of targets, over processes, in the first batches of the update. All targets of the update are known with
    its last batch: `correct` then multiplies the gradients by the factor that is missing.

    All processes of the run call the methods in this order for each batch. Counts stay on the device, for which nothing
    waits; processes sum them during the forward pass, and the losses after the backward pass, when they have just
    waited for each other's gradients.
    """

    def __init__(self) -> None:
        self._own: Any = None  # the targets of this process in the update so far
        self._expected: Any = None  # the targets of a batch, estimated from the first batches of the update
        self._total: Any = None  # the targets of the first batches, later of the update, over all processes
        self._work: Any = None
        self._losses = UpdateSum()
        self._is_first = False  # whether the batch is the first one of its update

    def begin(self, targets: Tensor, *, first: bool, last: bool) -> None:
        """Count the targets of a batch, a whole number `[]`; it may be the `first` and the `last` of its update."""
        self._own = targets if first else self._own + targets
        self._is_first = first
        if first:
            self._expected = None
        if first or last:
            self._total = self._own.clone()
            if count_processes() > 1:
                self._work = distributed.all_reduce(self._total, async_op=True)

    def scale(self, loss: Tensor) -> Tensor:
        """The result of a training step, from the loss `[]` summed over the targets of its batch."""
        if self._expected is None:
            self._expected = self._finish_total() / count_processes()
        self._losses.add(loss, first=self._is_first)
        return loss / self._expected

    def find_mean(self) -> Tensor | None:
        """The mean over all targets of the update, without a gradient, after its last batch; None without a loss."""
        summed = self._losses.find()
        return None if summed is None else summed / self._finish_total()

    def correct(self, parameters: Iterable[Tensor], accumulate: int) -> None:
        """Turn the gradients of a whole update into those of the mean; Lightning divided by `accumulate`."""
        multiply_gradients(parameters, self._expected * accumulate * count_processes() / self._finish_total())

    def _finish_total(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total.clamp(min=1)


@torch.no_grad()
def multiply_gradients(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply the gradients of parameters, which may be sharded over processes, in place."""
    gradients = [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The Euclidean norm `[]` of all gradients together, before they are clipped."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm: Any = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a model that is sharded over processes


def count_processes() -> int:
    """The processes that train together; 1 where there is no group of them."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
