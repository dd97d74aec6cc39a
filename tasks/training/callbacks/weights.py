"""The exponential moving average of the weights, and the stop of a training that produces NaN or infinity."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, distributed, nn

from longseq.blocks.sharding import own_part
from longseq.tasks.training.distributed import count_processes, updated


class ExponentialMovingAverage(Callback):
    """Averages the weights, validates with the average, and makes it the checkpoint's `state_dict`.

    After each update `average = d * average + (1 - d) * weights` with `d = decay`, or with `warmup`
    `d = min(decay, (1 + n) / (10 + n))` at the n-th update, so that the initial weights do not dominate short runs.
    The raw weights are the checkpoint's `current_model_state`; both continue exactly after a resume.

    Lightning's EMAWeightAveraging has no warm-up, and copies the weights at the first update.
    """

    def __init__(self, decay: float = 0.9999, warmup: bool = True) -> None:
        self.decay = decay
        self.warmup = warmup
        self._average: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}  # of the module
        self._swapped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._average = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning also calls this before a test, which uses the average in `state_dict`.
        if trainer.state.fn == TrainerFn.FITTING and "current_model_state" in checkpoint:
            self._average = checkpoint["state_dict"]
            pl_module.load_state_dict(checkpoint["current_model_state"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._weights = pl_module.state_dict()
        start = self._average or self._weights
        self._average = {name: start[name].to(weight, copy=True) for name, weight in self._weights.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not updated(trainer, batch_idx):
            return
        averages, weights = [], []
        for name, weight in self._weights.items():
            if weight.is_floating_point():
                averages.append(self._average[name])
                weights.append(weight)
            else:
                self._average[name].copy_(weight)
        n = trainer.global_step
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average:
            self._swap()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._swapped:
            self._swap()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # A checkpoint after an interrupted validation must not save the average as the raw weights.
        if self._swapped:
            self._swap()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._average:
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = self._average

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap()
        self._average, self._weights, self._swapped = {}, {}, False

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            held = weight.clone()
            weight.copy_(self._average[name])
            self._average[name].copy_(held)
        self._swapped = not self._swapped


class NonFiniteError(ValueError):
    """Training produced NaN or infinity."""


class _Norms(NamedTuple):
    """Norms of an update `[1 + P + G]`: the loss, the parameters `names`, and their gradients if checked."""

    step: int
    names: list[str]
    norms: Tensor


class NonFiniteStop(Callback):
    """Raises NonFiniteError with the update and the loss or parameter that was first not finite.

    Every update is checked on the device. The result is read every `every_n_steps` updates, before a checkpoint is
    written and at the end of an epoch, so no checkpoint holds a non-finite weight. Under a loss scaler
    (trainer.precision=16-mixed), gradients are not checked.

    With several processes, each checks its own loss and its shards of the parameters. All read the same result, which
    names the ranks, and stop together.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = every_n_steps
        self._loss: Tensor | None = None
        # Listed once in a training: walking through the modules takes longer than the checks.
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._unread: list[_Norms] = []  # of the updates since the last check

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parameters = [(name.removeprefix("backbone."), value) for name, value in pl_module.named_parameters()]
        self._unread = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self._loss is not None
        named = [(name, parameter) for name, parameter in self._parameters if parameter.grad is not None]
        parameters = [parameter for _, parameter in named]
        # Infinite gradients are usual while a loss scaler (16-mixed) settles; it skips their updates.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        gradients = [] if scaled else [parameter.grad for parameter in parameters]
        # Reduced to booleans only when they are read: each operation costs launch time.
        norms = torch.stack([own_part(self._loss).float(), *_norms(parameters), *_norms(gradients)])
        self._unread.append(_Norms(trainer.global_step + 1, [name for name, _ in named], norms))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if updated(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0:
            self.check()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parameters = []

    def check(self) -> None:
        """Raise NonFiniteError if an update was bad in any process. Waits for the device and the other processes."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        bad = torch.cat([one.norms for one in unread]).isfinite().logical_not().cpu()
        by_update = bad.split([len(one.norms) for one in unread])
        first = next((index for index, found in enumerate(by_update) if found.any()), None)
        index, device = first or 0, unread[0].norms.device
        steps = _of_all_ranks(torch.tensor(-1 if first is None else unread[index].step, device=device)).cpu()
        if int(steps.max()) < 0:
            return
        step = int(steps[steps >= 0].min())
        # Ranks that went bad at a later step are consequences.
        verdicts = _of_all_ranks(by_update[index].to(device)).cpu() & (steps == step).unsqueeze(1)
        culprit, ranks = _find_culprit(unread[index].names, verdicts)
        where = f" on ranks {ranks.nonzero().flatten().tolist()}" if len(ranks) > 1 else ""
        raise NonFiniteError(f"training diverged at step {step}{where}: {culprit}; lower recipe.learning_rate")


def _find_culprit(names: list[str], verdicts: Tensor) -> tuple[str, Tensor]:
    """What was first not finite, and a mask `[ranks]` of where; `verdicts [ranks, 1 + P + G]` are as in `_Norms`."""
    loss, parameters, gradients = verdicts.tensor_split([1, 1 + len(names)], dim=1)
    if bool(parameters.any()):
        index = int(parameters.any(0).nonzero()[0])
        return f"parameter {names[index]} went non-finite first", parameters[:, index]
    # The backward pass runs from the output to the input, so the last of the bad gradients was the first in time.
    index = int(gradients.any(0).nonzero()[-1]) if bool(gradients.any()) else -1
    if bool(loss.any()):
        reached = f", and its gradient reached parameter {names[index]} first" if index >= 0 else ""
        return f"the loss went non-finite first while every parameter was finite{reached}", loss.squeeze(1)
    return (
        f"the gradient of parameter {names[index]} went non-finite first while the loss was finite",
        gradients[:, index],
    )


def _norms(tensors: list[Any]) -> list[Tensor]:
    return [norm.float() for norm in torch._foreach_norm([own_part(x) for x in tensors])] if tensors else []


def _of_all_ranks(x: Tensor) -> Tensor:
    """The tensors `x [...]` of all processes: `[ranks, ...]`."""
    if count_processes() == 1:
        return x.unsqueeze(0)
    parts = [torch.empty_like(x) for _ in range(count_processes())]
    distributed.all_gather(parts, x)
    return torch.stack(parts)
