"""The exponential moving average of the weights, and the stop of a training that produces NaN or infinity."""

from typing import Any

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
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
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

    def on_validation_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._swapped:
            self._swap()

    # A checkpoint after an interrupted validation must not save the average as the raw weights.
    on_exception = on_validation_epoch_end

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


class NonFiniteStop(Callback):
    """Raises NonFiniteError with the update and the loss or parameter that was first not finite.

    Every update is checked on the device. The result is read every `every_n_steps` updates and before each checkpoint,
    so that no checkpoint holds a non-finite weight. Under a loss scaler (trainer.precision=16-mixed), gradients are not
    checked.

    With several processes, each checks its own loss and its shards of the parameters, and all stop together.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = every_n_steps
        self._loss: Tensor | None = None
        # Listed once in a training: walking through the modules takes longer than the checks.
        self._parameters: list[tuple[str, nn.Parameter]] = []
        # For each update since the last check: number, names and norms of the parameters, the loss and the gradients.
        self._unread: list[tuple[int, list[str], Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parameters = [(name.removeprefix("backbone."), value) for name, value in pl_module.named_parameters()]
        self._unread = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        assert self._loss is not None
        named = [(name, parameter) for name, parameter in self._parameters if parameter.grad is not None]
        # Infinite gradients are usual while a loss scaler (16-mixed) settles; it skips their updates.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        gradients = [] if scaled else [parameter.grad for _, parameter in reversed(named)]
        # From causes to effects: a bad parameter makes the loss bad, and this the gradients, the last layer's first.
        # Reduced to booleans only when they are read: each operation costs launch time.
        parameters = [parameter for _, parameter in named]
        norms = torch.stack([*_norms(parameters), own_part(self._loss).float(), *_norms(gradients)])
        self._unread.append((trainer.global_step + 1, [name for name, _ in named], norms))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if updated(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0:
            self.check()

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.check()

    on_train_epoch_end = on_save_checkpoint

    def check(self) -> None:
        """Raise NonFiniteError if an update was bad in any process. Waits for the device and the other processes."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        bad = torch.cat([norms for *_, norms in unread]).isfinite().logical_not().int()
        if count_processes() > 1:
            distributed.all_reduce(bad, distributed.ReduceOp.MAX)
        by_update = bad.bool().cpu().split([len(norms) for *_, norms in unread])
        for (step, names, _), found in zip(unread, by_update, strict=True):
            if found.any():
                parameters, gradients = ([f"{kind} {name}" for name in names] for kind in ("parameter", "gradient of"))
                first = [*parameters, "the loss", *reversed(gradients)][int(found.nonzero()[0])]
                raise NonFiniteError(
                    f"training diverged at step {step}: {first} went non-finite first; lower recipe.learning_rate"
                )


def _norms(tensors: list[Any]) -> list[Tensor]:
    return [norm.float() for norm in torch._foreach_norm([own_part(x) for x in tensors])] if tensors else []
