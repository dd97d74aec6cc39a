"""The base class of the modules of all tasks: it trains a model as a `Training` defines, and evaluates it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from longseq.models import CHECKPOINT_CONFIG, CHECKPOINT_RUN, check_continues, describe, kind_of, read, restore
from longseq.parameters import learning_rate_scales
from longseq.plugins import check_loaded
from longseq.tasks.data.info import Info
from longseq.tasks.data.module import TaskData
from longseq.tasks.data.sampler import derive_seed, seed_generators
from longseq.tasks.training import schedule
from longseq.tasks.training.checkpoint import known_data
from longseq.tasks.training.distributed import UpdateMean, gradient_norm, multiply_gradients, updated
from longseq.tasks.training.logger import log_metrics
from longseq.tasks.training.recipe import Training

# Lightning's precisions that keep the weights, and the sums and averages of them, in half precision.
_HALF_WEIGHTS = ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")

Self = TypeVar("Self", bound="TrainedModule")
Result = TypeVar("Result")


class TrainedModule(LightningModule):
    """Trains a model as a `Training` defines, and evaluates it; without a `Training` it only evaluates.

    A subclass defines `training_step`, `update_metrics`, and `val_metrics` and `test_metrics`, logged as `val/...` and
    `test/...`: metrics of torchmetrics, whose `higher_is_better` is the direction for callbacks that monitor them. A
    training step calls `seed_batch` first, so that a resumed run repeats the uninterrupted one. If every batch of the
    run has the same number of targets, it returns the mean loss of its batch. Otherwise `count_targets` returns the
    number of targets, and the step returns `mean_of_update` of its summed loss.

    Any loader works: `read_batch` brings its batches to the form of the task. Checkpoints hold `info`, which describes
    the data, and the description of a model of a registered kind, and load without the run's configuration.
    """

    # Constructor arguments that a checkpoint stores for `load_from_checkpoint`; attributes of JSON's types.
    kept_options: ClassVar[tuple[str, ...]] = ()
    has_gradients = True  # by which the recipe trains the model
    info: Any = None
    val_metrics: nn.ModuleDict
    test_metrics: nn.ModuleDict
    last_update: int | None = None  # after which the run ends, if `Training.length` defines it

    def __init__(self, backbone: nn.Module, training: Training | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(dict(training.hyperparameters) if training else {}, logger=False)
        self.backbone = backbone
        self.recipe = training
        self.seed = training.seed if training else 0
        self._stage: str | None = None  # fit, validate, test or predict, inside the Trainer
        self._update_rate = training.learning_rate if training else 0.0  # of the latest update
        self._gradient_norm = torch.zeros(())  # of the latest update that is logged
        self._known_epoch: schedule.Epoch | None = None
        self._reload_every: int | None = None  # the Trainer's reload_dataloaders_every_n_epochs
        self._saved_schedules: list[Mapping[str, Any]] = []  # constant rates in the checkpoint that is continued
        self._saved_update = 0
        self._mean: UpdateMean | None = None  # for batches that differ in their number of targets

    @property
    def learning_rate(self) -> float | None:
        """The highest rate of the training, if any; Lightning's `Tuner.lr_find` sets it."""
        return self.recipe.learning_rate if self.recipe else None

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        assert self.recipe is not None, "this module only measures"
        self.recipe = replace(self.recipe, learning_rate=rate)

    @classmethod
    def from_config(
        cls: type[Self], config: Mapping[str, Any], backbone: nn.Module, info: Any, training: Training | None
    ) -> Self:
        """The module of a configuration, for a model and the data of `info`.

        A subclass whose constructor takes more than the model and `training` overrides this and `arguments_for`.
        """
        return cls(backbone, training=training)

    @classmethod
    def arguments_for(cls, backbone: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments for a loaded model and its data. ValueError for a model of another task."""
        return {}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls: type[Self], checkpoint_path: Any, map_location: Any = None, **kwargs: Any
    ) -> Self:
        """The module of a checkpoint, with the model that it describes, in training mode as in Lightning.

        The checkpoint may be from `longseq train`, Lightning's ModelCheckpoint or `Trainer.save_checkpoint`. It is read
        without unpickling code. If it has averaged weights, they are loaded.

        `map_location` is the device of the module, by default the CPU. `kwargs` are arguments of the constructor, which
        replace those in the checkpoint: `training`, without which the module only measures; `backbone`, for a model of
        no registered kind. ValueError for a damaged file, and for one of another task.
        """
        if "backbone" in kwargs:
            whole = torch.load(checkpoint_path, map_location="cpu", weights_only=True)
            kwargs = {**cls._kept(whole.get(CHECKPOINT_RUN) or {}), **kwargs}
            return super().load_from_checkpoint(checkpoint_path, map_location, weights_only=True, **kwargs)
        saved = read(checkpoint_path, label=str(checkpoint_path))
        run = saved.run.get(CHECKPOINT_RUN) or {}
        check_loaded((run.get("config") or {}).get("plugins") or [], saved.label)
        backbone = restore(saved)
        arguments = cls.arguments_for(backbone, known_data(saved, backbone))
        module = cls(backbone, **{**arguments, **cls._kept(run), **kwargs}).train()
        return module if map_location is None else module.to(map_location)

    @classmethod
    def _kept(cls, run: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in (run.get("options") or {}).items() if name in cls.kept_options}

    @property
    def predicts(self) -> bool:
        """True inside `Trainer.predict`, whose batches need no targets."""
        return self._stage == TrainerFn.PREDICTING

    def read_batch(self, batch: Any) -> Any:
        """The pair (inputs, targets) of a batch of any loader; subclasses may take other batches than pairs."""
        return batch

    def _read_before_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.read_batch(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_batch(self.read_batch(batch), self.val_metrics, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate_batch(self.read_batch(batch), self.test_metrics, "test")

    def evaluate_batch(self, batch: Any, metrics: Any, stage: str) -> None:
        """Update and log the metrics of a stage, val or test; a process's part of a batch may be empty."""
        if len(batch[1]):
            self.update_metrics(batch, metrics)
        self._log_metrics(metrics, stage)

    def _log_metrics(self, metrics: Mapping[str, Any], stage: str) -> None:
        for name, metric in metrics.items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)

    def update_metrics(self, batch: Any, metrics: Any) -> None:
        """Update the metrics of a stage with a batch of at least one sample."""
        raise NotImplementedError

    def higher_is_better(self, name: str, key: str) -> bool:
        """True if higher values of a metric, such as `val/loss`, are better. ValueError, naming `key`, if unknown."""
        known = self.directions()
        if name not in known:
            raise ValueError(f"{key}={name} is no metric of this run")
        return known[name]

    def directions(self) -> dict[str, bool]:
        """For each metric that states it, such as `val/loss` and `test/loss`: True if higher values are better."""
        named = {f"val/{name}": metric for name, metric in self.val_metrics.items()}
        named |= {f"test/{name}": metric for name, metric in self.test_metrics.items()}
        directions = {name: metric.higher_is_better for name, metric in named.items()}
        return {name: bool(better) for name, better in directions.items() if better is not None}

    def compiled(self, forward: Callable[..., Result], **options: Any) -> Callable[..., Result]:
        """`forward` for training steps, compiled with `options` if the training sets `compile_mode`."""
        mode = self.recipe.compile_mode if self.recipe else None
        return forward if mode is None else torch.compile(forward, mode=mode, **options)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if kind_of(self.backbone) is not None:
            checkpoint[CHECKPOINT_CONFIG] = describe(self.backbone)
        run: dict[str, Any] = dict(checkpoint.get(CHECKPOINT_RUN) or {})
        if self.kept_options:
            run["options"] = {name: getattr(self, name) for name in self.kept_options}
        if isinstance(self.info, Info):
            run.setdefault("data", self.info.to_dict())
        if run:
            checkpoint[CHECKPOINT_RUN] = run

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_continues(self.backbone, checkpoint.get(CHECKPOINT_CONFIG))
        if self._stage != TrainerFn.FITTING:
            return
        saved = checkpoint.get("lr_schedulers") or []
        self._saved_schedules = [state for state in saved if schedule.is_constant_rate(state)]
        self._saved_update = checkpoint["global_step"]
        if self._saved_update == self.last_update:  # its validation may be due
            self._validate_at_end()
        # A constant rate depends only on the update, and this run may have another length.
        checkpoint["lr_schedulers"] = [{} if schedule.is_constant_rate(state) else state for state in saved]
        self.on_fit_start()

    def on_fit_start(self) -> None:
        # A sharded model loads its checkpoint after on_fit_start, others before they have a schedule.
        own = (config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs)
        for states in zip(self._saved_schedules, filter(schedule.is_constant_rate, own), strict=False):
            schedule.check_end(self._saved_update, *states)

    def on_train_start(self) -> None:
        if self._reload_every is not None:
            trainer: Any = self.trainer
            trainer.reload_dataloaders_every_n_epochs, self._reload_every = self._reload_every, None

    def preview(self, batch: Any) -> Tensor:
        """What the model computes of a batch, for `KernelPreparation`."""
        found: Tensor = self(batch[0])
        return found

    def count_flops(self, batch: Any) -> int | None:
        """The operations of a training step on a batch of this process, None if unknown."""
        return None

    def seed_batch(self, batch_idx: int) -> tuple[int, int]:
        """Seed the draws of a training step by (seed, update, part); returns the update and the part.

        An effective batch has as many parts as there are processes times accumulated batches (see `UpdateSampler`). A
        resumed run on another number of devices has the same draws.
        """
        trainer = self.trainer
        accumulate, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        if math.isinf(batches):  # a loader without a length
            update = self.global_step
        else:
            update = self.current_epoch * math.ceil(batches / accumulate) + batch_idx // accumulate
        part = batch_idx % accumulate * trainer.world_size + self.global_rank
        seed_generators(derive_seed(self.seed, update, part), self.device)
        return update, part

    def count_targets(self, batch: Any) -> Tensor | int | None:
        """The number of targets over which a batch's loss is summed; None if all batches have the same number.

        Preferably a tensor `[]` on the batch's device, for which nothing waits.
        """
        return None

    def mean_of_update(self, loss: Tensor) -> Tensor:
        """The result of a training step, from the loss `[]` summed over the batch's targets (see `count_targets`).

        The update has the gradient of `train/loss`, the mean over its targets of all processes and accumulated batches.
        """
        assert self._mean is not None, f"{type(self).__name__}.count_targets gives None"
        return self._mean.scale(loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.last_update is not None and self.global_step >= self.last_update:
            # Lightning ends runs only after epochs, and would go on from a checkpoint of the last update.
            self.trainer.should_stop = True
            return -1  # skips the rest of the epoch
        count = self.count_targets(self.read_batch(batch))
        if count is not None:
            self._mean = self._mean or UpdateMean()
            targets = count if isinstance(count, Tensor) else torch.full((), count, device=self.device)
            first = batch_idx % self.trainer.accumulate_grad_batches == 0
            self._mean.begin(targets, first=first, last=updated(self.trainer, batch_idx))
        return None

    def on_after_backward(self) -> None:
        batch_idx, accumulate = self.trainer.fit_loop.batch_idx, self.trainer.accumulate_grad_batches
        if accumulate == 1 or not updated(self.trainer, batch_idx):
            return
        parts = batch_idx % accumulate + 1
        if self._mean is not None:
            self._mean.correct(self.parameters(), accumulate)
        elif parts < accumulate:  # the last update of an epoch; Lightning has divided by `accumulate`
            multiply_gradients(self.parameters(), accumulate / parts)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if (loss := self._loss_of_update()) is not None:
            self.log("train/loss", loss)
        # At the end of the batch, the schedule has set the next update's rate.
        # Parameters with a larger rate of their own do not count.
        self._update_rate = max(g["lr"] / max(g.get("lr_scale", 1.0), 1.0) for g in optimizer.param_groups)
        if self._logs_update(self.global_step + 1):
            self._gradient_norm = gradient_norm(optimizer)
        if self.global_step + 1 == self.last_update:
            # The run ends here, with a validation.
            self._validate_at_end()
            ends_epoch = self.trainer.check_val_every_n_epoch is not None and self.trainer.is_last_batch
            if not ends_epoch or not self._epoch().counted:  # otherwise Lightning counts the epochs itself
                self.trainer.should_stop = True

    def _validate_at_end(self) -> None:
        if self.trainer.check_val_every_n_epoch is not None:
            self.trainer.check_val_every_n_epoch = 1

    def _loss_of_update(self) -> Tensor | None:
        """The loss of the update over all processes; None if the training step logs its own."""
        return None if self._mean is None else self._mean.find_mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if updated(self.trainer, batch_idx) and self._logs_update(self.global_step):
            metrics = {"train/lr": self._update_rate, "train/gradient_norm": float(self._gradient_norm)}
            log_metrics(self.trainer.loggers, metrics, self.global_step - 1)

    def _logs_update(self, update: int) -> bool:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.logger is not None and update % every == 0

    def setup(self, stage: str) -> None:
        """Set the Trainer's length and validation interval, if `Training.length` defines them.

        ValueError for weights in half precision, which lose small updates, as do averages of weights and metrics.
        """
        trainer, data = self.trainer, self.trainer.datamodule  # type: ignore[attr-defined]
        if trainer.precision in _HALF_WEIGHTS:
            raise ValueError(f"precision={trainer.precision} loses small updates: take 16-mixed or bf16-mixed")
        if trainer.precision == "64-true":
            self.double()  # before a checkpoint is read; Lightning does it later
        self._stage, self._known_epoch = stage, None
        if self.info is None and isinstance(getattr(data, "info", None), Info):
            self.info = data.info
        # Callbacks get batches in the form of the task. As a method of the class, this hook would make Lightning warn.
        # A user's data module with `on_after_batch_transfer` gets its own batches there.
        self.__dict__.pop("on_before_batch_transfer", None)
        if data is None or not (isinstance(data, TaskData) or is_overridden("on_after_batch_transfer", data)):
            self.on_before_batch_transfer = self._read_before_transfer  # type: ignore[method-assign]
        if stage == TrainerFn.FITTING:
            length = self.recipe.length if self.recipe else None
            self._saved_schedules, self.last_update = [], None
            if length is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self.last_update = schedule.set_length(trainer, length, self._epoch())

    def teardown(self, stage: str) -> None:
        self._stage = None

    def configure_optimizers(self) -> Any:
        recipe = self.recipe
        if recipe is None:
            raise ValueError(f"this {type(self).__name__} only measures: give it training=Training(...)")
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        fused = self.device.type == "cuda" and not scaled and schedule.can_fuse(recipe.optimizer)
        optimizer = recipe.optimizer(self.backbone, lr=recipe.learning_rate, **({"fused": True} if fused else {}))
        schedule.scale_rates(optimizer, learning_rate_scales(self.backbone))
        epoch = self._epoch()
        updates = schedule.count_updates(self.trainer, recipe, epoch)
        scheduler = schedule.build_schedule(recipe, optimizer, epoch, updates)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        schedule.step_schedule(scheduler, self.global_step)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        plugin = self.trainer.precision_plugin
        if gradient_clip_val and isinstance(plugin, MixedPrecision) and plugin.scaler is None:
            # Lightning refuses fused optimizers, which unscale gradients after clipping. bfloat16 has no scaler.
            algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
            Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    @property
    def epochs_trained(self) -> float:
        """The number of epochs so far; a whole number after a whole epoch."""
        epochs = round(self.global_step / self._epoch().updates, 3)
        return int(epochs) if epochs == int(epochs) else epochs

    def _epoch(self) -> schedule.Epoch:
        """The updates and tokens of an epoch; counted once, because a stream is opened for it."""
        if self._known_epoch is None:
            trainer: Any = self.trainer
            self._known_epoch = schedule.count_epoch(trainer, trainer.datamodule) or self._count_loader(trainer)
        return self._known_epoch

    def _count_loader(self, trainer: Any) -> schedule.Epoch:
        """The epoch of a user's loader, or of a data module that does not count its batches."""
        trainer.fit_loop.setup_data()
        # When the fit begins, Lightning makes the loader anew and loads a checkpoint's state into it.
        if self._reload_every is None:
            self._reload_every = trainer.reload_dataloaders_every_n_epochs
        trainer.reload_dataloaders_every_n_epochs = -1
        return schedule.epoch_of_loader(trainer, self.recipe)
