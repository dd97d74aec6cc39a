"""Updates over accumulated batches and several processes, and models that are sharded over processes (trainer=fsdp)."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn

from longseq.blocks.sharding import has_shards, own_part


def updated(trainer: Trainer, batch_idx: int) -> bool:
    """True if the weights were updated after this batch; False if its gradients were only accumulated."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


class UpdateSum:
    """A sum over the accumulated batches of an update and over processes. It stays on the device."""

    def __init__(self) -> None:
        self._own: Any = None  # the sum of this process

    def add(self, value: Tensor, *, first: bool) -> None:
        """Add the number `[]` of a batch; `first` starts a new update."""
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
    """The mean of a loss over all targets of an update whose batches differ in their number of targets.

    Lightning divides a loss by the number of accumulated batches and averages gradients over processes, so a batch with
    few targets would count as much as one with many. Here a loss is a sum over targets. `scale` divides it by an
    estimate, the mean number of targets in the first batches of the update. The last batch completes the number of
    targets, and `correct` then multiplies the gradients by the missing factor.

    All processes call the methods in this order for each batch. Counts stay on the device. They are summed over
    processes during the forward pass, and the losses after the backward pass.
    """

    def __init__(self) -> None:
        self._own: Any = None  # the targets of this process in the update so far
        self._expected: Any = None  # the targets of a batch, estimated from the first batches of the update
        self._total: Any = None  # the targets of the first batches, later of the update, over all processes
        self._work: Any = None
        self._losses = UpdateSum()
        self._is_first = False  # whether the batch is the first one of its update

    def begin(self, targets: Tensor, *, first: bool, last: bool) -> None:
        """Count the targets of a batch, a whole number `[]`; `first` and `last` are its place in the update."""
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
        """The mean loss over all targets of the update, detached, after its last batch; None without a loss."""
        summed = self._losses.find()
        return None if summed is None else summed / self._finish_total()

    def correct(self, parameters: Iterable[Tensor], accumulate: int) -> None:
        """Turn the gradients of a whole update into gradients of the mean; Lightning divided by `accumulate`."""
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
    """The Euclidean norm `[]` of all gradients together, before clipping."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm: Any = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded models have the first


def count_processes() -> int:
    """The number of processes that train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class FullyShardedStrategy(ModelParallelStrategy):
    """Shards the module's `backbone` over all processes with torch's `fully_shard`, block by block.

    Checkpoints hold whole tensors in one file, as with other strategies: a run may continue on any number of devices.

    `devices` is the number of processes. `reshard_after_forward` frees a block's gathered weights after its forward
    pass and gathers them again, in less memory and more time. `options` are of Lightning's strategy, such as `timeout`.
    """

    def __init__(self, devices: int, *, reshard_after_forward: bool = True, **options: Any) -> None:
        whole = {"data_parallel_size": devices, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
        super().__init__(**whole, **options)  # type: ignore[arg-type]
        self.reshard_after_forward = reshard_after_forward

    def setup_environment(self) -> None:
        super().setup_environment()
        module: Any = self.lightning_module
        # As a method of the class, this hook would make Lightning warn in runs without shards.
        module.configure_model = partial(
            shard, module.backbone, self.device_mesh["data_parallel"], reshard=self.reshard_after_forward
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer states, of a sharded run or of another.

        Lightning 2.6 takes an optimizer's numbers for the module's order of parameters. They are places in the groups,
        so with groups for weight decay, states would go to other parameters.
        """
        from torch.distributed.checkpoint import state_dict

        path, model = Path(self.broadcast(checkpoint_path)), self.model
        assert model is not None
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        whole = state_dict.StateDictOptions(full_state_dict=True)
        state_dict.set_model_state_dict(model, checkpoint.pop("state_dict"), options=whole)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            named = _name_parameters(state, optimizer, model)
            state_dict.set_optimizer_state_dict(model, optimizer, named, options=whole)
        return checkpoint


def shard(backbone: nn.Module, mesh: Any, *, reshard: bool = True) -> None:
    """Shard a model over the processes of a mesh, block by block, unless it is sharded already."""
    if has_shards(backbone):
        return
    from torch.distributed.fsdp import fully_shard

    blocks: Any = getattr(backbone, "blocks", ())  # their weights are of one type, see `TrainedModule.setup`
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(backbone, mesh=mesh)


def _name_parameters(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's state dict with names in place of parameter numbers, matched by their places in the groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    numbers: dict[Any, str] = {}
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        named = [names[id(parameter)] for parameter in own["params"]]
        numbers |= dict(zip(saved["params"], named, strict=True))
        groups.append({**saved, "params": named})
    return {"state": {numbers[number]: each for number, each in state["state"].items()}, "param_groups": groups}
