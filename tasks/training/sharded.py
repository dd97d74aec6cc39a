"""Training of a model that is sharded over processes by torch's `fully_shard` (trainer=fsdp)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from longseq.blocks.precision import KeepsFloat32
from longseq.blocks.sharding import has_shards


class FullyShardedStrategy(ModelParallelStrategy):
    """Shards the module's `backbone` over all processes, block by block.

    Checkpoints are those of other strategies: whole tensors in one file. So a run continues on one device or on many.

    Args:
        devices: the processes of the run.
        reshard_after_forward: give the gathered weights of a block back after its forward pass, and gather them again
            for the backward pass; without it a run takes more memory and less time.
        timeout: after which a process that waits for others gives up; by default torch's.
    """

    def __init__(
        self, devices: int, *, reshard_after_forward: bool = True, timeout: timedelta | float | None = None
    ) -> None:
        given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False, **given)
        self.reshard_after_forward = reshard_after_forward

    def setup_environment(self) -> None:
        super().setup_environment()
        module: Any = self.lightning_module
        # Lightning wants the hook of the module itself, and warns runs without shards of one in its class.
        module.configure_model = partial(
            shard, module.backbone, self.device_mesh["data_parallel"], reshard=self.reshard_after_forward
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and the states of optimizers, of a sharded run or of another.

        Lightning 2.6 takes the parameters of an optimizer to be numbered as those of the module are. Those of a run on
        one device are numbered as they stand in the groups of its optimizer: with groups of weight decay, states would
        go to other parameters.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        path, model = Path(self.broadcast(checkpoint_path)), self.model
        assert model is not None
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, checkpoint.pop("state_dict"), options=whole)
        saved = checkpoint.get("optimizer_states", [])
        for optimizer, state in zip(self.optimizers, saved, strict=False):
            set_optimizer_state_dict(model, optimizer, name_parameters(state, optimizer, model), options=whole)
        return checkpoint


def shard(backbone: nn.Module, mesh: Any, *, reshard: bool = True) -> None:
    """Shard a model over the processes of a mesh, each of its `blocks` by itself; a sharded one stays as it is.

    `reshard` is that of `FullyShardedStrategy`, for the blocks.
    """
    if has_shards(backbone):
        return
    from torch.distributed.fsdp import fully_shard

    blocks: Any = getattr(backbone, "blocks", ())
    for block in blocks:
        for part in _parts_of_another_type(block):
            # They are small, and some give their parameters to the parts around them: they stay whole between passes.
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(backbone, mesh=mesh)


def _parts_of_another_type(block: nn.Module) -> list[nn.Module]:
    """The parts that stay in float32 in a block of half precision: `fully_shard` takes parameters of one type."""
    if len({parameter.dtype for parameter in block.parameters()}) < 2:
        return []
    return [part for part in block.modules() if isinstance(part, KeepsFloat32)]


def name_parameters(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's state dict with the names of parameters in place of numbers.

    As in torch's `load_state_dict`, parameters are told by their places in the groups. ValueError where the groups are
    others than those of `optimizer`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    numbers: dict[Any, str] = {}
    if [len(group["params"]) for group in state["param_groups"]] != [len(g["params"]) for g in optimizer.param_groups]:
        raise ValueError("resume: the optimizer of the checkpoint has other groups of parameters than this one")
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        named = [names[id(parameter)] for parameter in own["params"]]
        numbers |= dict(zip(saved["params"], named, strict=True))
        groups.append({**saved, "params": named})
    return {"state": {numbers[number]: each for number, each in state["state"].items()}, "param_groups": groups}
