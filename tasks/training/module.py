"""What the modules of all tasks share: optimizer, schedule, rate and gradients in the log, randomness of a batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from timm.optim import create_optimizer_v2, get_optimizer_class
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.wsd_lr import WSDLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from longseq.models import CHECKPOINT_CONFIG, CHECKPOINT_RUN, check_continues, describe, kind_of, read, restore
from longseq.plugins import check_loaded
from longseq.tasks.data.info import Info
from longseq.tasks.data.loader import count_repeated
from longseq.tasks.data.seeds import derive_seed
from longseq.tasks.training.callbacks.updates import updated
from longseq.tasks.training.checkpoint import known_data
from longseq.tasks.training.length import Epoch, count_epoch, refuse_other_epoch
from longseq.tasks.training.logger import log_metrics
from longseq.tasks.training.precision import refuse_half_weights, widen_weights
from longseq.tasks.training.recipe import Training, is_of_timm
from longseq.tasks.training.update_mean import UpdateMean, multiply_gradients

_log = logging.getLogger(__name__)

# The epochs after which timm's schedules in steps first lower the rate, unless a recipe tells others.
STEP = 90
# The part of a run, after its warm-up, in which timm lets a constant rate fall unless decay_epochs tells another.
DECAY = 0.2
# Options with which timm's schedules go on after a run as it is given here, and their values without one.
_LENGTHENING = {"cycle_limit": 1, "cycle_mul": 1.0, "cycle_decay": 0.1, "cooldown_epochs": 0}
# Names in the states of torch's schedules that compute a rate from the one before, alike for all groups.
_RECURSIVE = {"T_max", "gamma", "power", "start_factor", "factor"}

Self = TypeVar("Self", bound="TrainedModule")
Result = TypeVar("Result")


class TrainedModule(LightningModule):
    """Trains a model as a `Training` defines, and evaluates it; without a `Training` it only evaluates.

    Its checkpoints describe the model if that is of a registered kind (see `longseq.models`): they then load without
    the configuration of the run.

    The schedule is stepped after each update. A subclass defines `training_step`, `update_metrics`, and `val_metrics`
    and `test_metrics`, logged as `val/...` and `test/...`: metrics of torchmetrics, whose `higher_is_better` is the
    direction for callbacks that monitor them. A training step calls `seed_batch` first: randomness in a batch is a
    function of (seed, update, part of the effective batch), so that a resumed run repeats the uninterrupted one, also
    if other processes take the parts.

    If every batch of the run has the same number of targets, a training step returns the mean loss of its batch.
    Otherwise `count_targets` returns the number of targets, and the step returns `mean_of_update` of its summed loss.

    Any loader of Lightning serves: `read_batch` brings its batches to the form of the task. `info` is what is known of
    the data; a checkpoint holds it, and so `load_from_checkpoint` and the commands of longseq know it again.

    Class attributes:
        kept_options: the constructor's arguments that a checkpoint holds for `load_from_checkpoint`, each an attribute
            of numbers, text and None, or lists and dictionaries of these.
    """

    kept_options: ClassVar[tuple[str, ...]] = ()

    info: Any = None

    val_metrics: nn.ModuleDict
    test_metrics: nn.ModuleDict

    # The update after which the run ends, if `Training.length` defines it.
    last_update: int | None = None

    def __init__(self, backbone: nn.Module, training: Training | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(dict(training.hyperparameters) if training else {}, logger=False)
        self.backbone = backbone
        self.recipe = training
        self.seed = training.seed if training else 0
        self._learning_rate = training.learning_rate if training else 0.0  # of the latest update
        self._gradient_norm = torch.zeros(())  # of the latest update that is logged
        self._known_epoch: Epoch | None = None
        # Of the checkpoint that is continued: its schedules with a constant rate, and its update.
        self._saved_schedules: list[Mapping[str, Any]] = []
        self._saved_update = 0
        self._told_repeated: set[str] = set()  # kinds of measurements whose warning was printed
        self._mean: UpdateMean | None = None  # for batches that differ in their number of targets
        self._was_empty = False  # the latest epoch
        self._told_short = False

    @property
    def learning_rate(self) -> float | None:
        """The highest rate of the training, None without one; Lightning's `Tuner.lr_find` sets what it finds."""
        return self.recipe.learning_rate if self.recipe else None

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        assert self.recipe is not None, "this module only measures"
        self.recipe = replace(self.recipe, learning_rate=rate)

    @property
    def has_gradients(self) -> bool:
        """True if the recipe trains the model; False for one that a run fits in another way."""
        return True

    @classmethod
    def from_config(
        cls: type[Self], config: Mapping[str, Any], backbone: nn.Module, info: Any, training: Training | None
    ) -> Self:
        """The module of a configuration, for a model and the data of `info`; without `training` it only evaluates.

        A subclass whose constructor takes more than the model and `training` defines this method.
        """
        return cls(backbone, training=training)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls: type[Self],
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """The module of a checkpoint, with the model that it describes; in training mode, as Lightning's are.

        The checkpoint may be of `longseq train`, of Lightning's ModelCheckpoint or of `Trainer.save_checkpoint`. It is
        read without unpickling code. Of averaged weights it has the average.

        Args:
            map_location: the device of the module; by default the CPU.
            kwargs: arguments of the constructor that the checkpoint does not tell, or others than it tells: `training`,
                without which the module only measures; `backbone`, for a model of no registered kind.

        Raises:
            ValueError: in one line, what is wrong with the file, or that it is of another task.
        """
        if hparams_file is not None or strict is False or weights_only is False:
            raise ValueError(
                "load_from_checkpoint reads all weights and nothing that runs code: leave hparams_file, strict and "
                "weights_only out"
            )
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise ValueError(f"map_location={map_location} is no device: give its name, such as cpu")
        if "backbone" in kwargs:
            # Lightning takes open files and addresses, too.
            if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_file():
                whole = torch.load(checkpoint_path, map_location="cpu", weights_only=True, mmap=True)
                kwargs = {**cls._kept(whole.get(CHECKPOINT_RUN) or {}), **kwargs}
            return super().load_from_checkpoint(checkpoint_path, map_location, weights_only=True, **kwargs)
        label = str(checkpoint_path)
        saved = read(checkpoint_path, label=label)
        run = saved.run.get(CHECKPOINT_RUN) or {}
        check_loaded((run.get("config") or {}).get("plugins") or [], label)
        backbone = restore(saved)
        try:
            told = cls.arguments_for(backbone, known_data(saved, backbone))
        except ValueError as error:
            raise ValueError(f"{label} is no checkpoint of {cls.__name__}: {error}") from error
        module = cls(backbone, **{**told, **cls._kept(run), **kwargs}).train()
        return module if map_location is None else module.to(map_location)

    @classmethod
    def _kept(cls, run: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments of `kept_options` that the hyperparameters of a checkpoint hold."""
        return {name: value for name, value in (run.get("options") or {}).items() if name in cls.kept_options}

    @classmethod
    def arguments_for(cls, backbone: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments that follow from a loaded model and what is known of its data.

        ValueError, in one line, for a model of another task. A subclass whose constructor takes more than the model and
        `training` defines this method.
        """
        return {}

    @property
    def predicts(self) -> bool:
        """True inside `Trainer.predict`, whose batches need no targets."""
        return self._trainer is not None and self.trainer.predicting

    def read_batch(self, batch: Any) -> Any:
        """A batch of any loader as the pair (inputs, targets) that the steps of this module read.

        A batch of this form is returned as it is. A subclass defines which others it takes. ValueError, in one line,
        for a batch of none of these forms.
        """
        return batch

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        # Lightning calls this before the hook of the same name, and warns of that one wherever there is a data module.
        # Callbacks see what this returns. A data module with a later hook of its own gets its own batches there.
        batch = super()._on_before_batch_transfer(batch, dataloader_idx)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        own = data is not None and is_overridden("on_after_batch_transfer", data)
        return batch if own else self.read_batch(batch)

    def train_dataloader(self) -> Any:
        """Called by Lightning where `fit` got no data for training. ValueError, in one line, says what to give."""
        raise ValueError(
            "fit has no training data: give it a loader, trainer.fit(module, DataLoader(...)), or a data module with "
            "train_dataloader, datamodule=..."
        )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _refuse_further_loader("validate", dataloader_idx)
        return self.evaluate_batch(self.read_batch(batch), self.val_metrics, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _refuse_further_loader("test", dataloader_idx)
        return self.evaluate_batch(self.read_batch(batch), self.test_metrics, "test")

    def evaluate_batch(self, batch: Any, metrics: Any, stage: str) -> Any:
        """Update the metrics of a stage, val or test, and log them; a process's part of a batch may be empty.

        By default `update_metrics` does the first; a subclass may define either of the two.
        """
        if len(batch[1]):
            self.update_metrics(batch, metrics)
        for name, metric in metrics.items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)

    def update_metrics(self, batch: Any, metrics: Any) -> None:
        """Update the metrics of a stage with a batch of at least one sample."""
        raise NotImplementedError(f"{type(self).__name__} defines neither update_metrics nor evaluate_batch")

    def higher_is_better(self, name: str, key: str) -> bool:
        """True if higher values of a validation metric, such as `val/loss`, are better, as the metric states.

        ValueError, which names `key`, if the module has no such metric or the metric does not state it.
        """
        metrics = {f"val/{metric}": value for metric, value in self.val_metrics.items()}
        if name not in metrics:
            near = next((one for one in metrics if one.replace("/", "_") in (name, f"val_{name}")), None)
            hint = f"did you mean {near}? " if near else ""
            raise ValueError(f"{key}={name} is never measured: {hint}choose one of {', '.join(metrics)}")
        better: Any = metrics[name].higher_is_better
        if better is None:
            raise ValueError(
                f"{key}={name} does not say which values are better: set higher_is_better in "
                f"{type(metrics[name]).__name__}, or choose another metric"
            )
        return bool(better)

    def directions(self) -> dict[str, bool]:
        """For each metric that states it, such as `val/loss` and `test/loss`: True if higher values are better."""
        stages = {"val": self.val_metrics, "test": self.test_metrics}
        return {
            f"{stage}/{name}": bool(metric.higher_is_better)
            for stage, metrics in stages.items()
            for name, metric in metrics.items()
            if metric.higher_is_better is not None
        }

    def compiled(self, forward: Callable[..., Result], **options: Any) -> Callable[..., Result]:
        """`forward` for training steps; compiled with these options of `torch.compile` if the training sets it.

        It is a function and not a module, so that the checkpoint holds the weights once.
        """
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

    def check_continues(self, checkpoint: Mapping[str, Any], trainer: Any = None, data: Any = None) -> None:
        """ValueError, in one line, if a checkpoint's run cannot go on with this model, Trainer and data module.

        Without a Trainer the model alone is judged.
        """
        try:
            check_continues(self.backbone, checkpoint.get(CHECKPOINT_CONFIG))
        except ValueError as error:
            raise ValueError(f"resume: the checkpoint cannot be continued: {error}") from error
        config = (checkpoint.get("hyper_parameters") or {}).get("config") or {}
        if trainer is not None and not trainer.fast_dev_run and "trainer" in config:
            refuse_other_epoch(config["trainer"], trainer, data)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        is_fit = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        trainer: Any = self.trainer if is_fit else None
        self.check_continues(checkpoint, trainer, trainer.datamodule if is_fit else None)
        if is_fit:
            saved = checkpoint.get("lr_schedulers") or []
            self._saved_schedules = [state for state in saved if _is_of_constant_rate(state)]
            self._saved_update = checkpoint["global_step"]
            if self._saved_update == self.last_update:  # whose validation may be due
                self._validate_at_end()
            # These schedules are functions of the update alone, and this run may end elsewhere.
            # So are timm's others, of which earlier versions saved some that were never stepped.
            kept = [{} if _is_of_constant_rate(state) or state.get("t_in_epochs") else state for state in saved]
            checkpoint["lr_schedulers"] = kept
            _mend_rates(checkpoint)
            self._check_ends()

    def on_fit_start(self) -> None:
        self._check_ends()

    def on_validation_start(self) -> None:
        self._tell_repeated("validation", self.trainer.val_dataloaders, self.trainer.limit_val_batches)

    def on_test_start(self) -> None:
        self._tell_repeated("test", self.trainer.test_dataloaders, self.trainer.limit_test_batches)

    def _tell_repeated(self, kind: str, loaders: Any, limit: float) -> None:
        whole = isinstance(limit, float) and limit == 1.0  # an int is a number of batches
        repeated = count_repeated(loaders) if whole else 0
        if repeated and kind not in self._told_repeated and self.trainer.is_global_zero:
            _log.warning(
                f"{kind} counts {repeated} sample{'s' if repeated > 1 else ''} once more: the loader repeats them so "
                "that all processes have equally many; one process (trainer.devices=1) counts each sample once"
            )
            self._told_repeated.add(kind)

    def on_train_epoch_end(self) -> None:
        loop = self.trainer.fit_loop
        was_empty, self._was_empty = self._was_empty, loop.epoch_loop.batch_progress.current.ready == 0
        if loop.max_epochs == -1 and self._was_empty and was_empty:
            # Lightning would ask an empty stream for ever. One epoch is empty where a loader continues at its end.
            end = f" of {self.last_update}" if self.last_update is not None else ""
            raise ValueError(
                f"the training loader gives no more batches after update {self.global_step}{end}: give data that can "
                "be read again in each epoch, or fewer updates"
            )
        self._tell_short_epoch()

    def _tell_short_epoch(self) -> None:
        """Warn, once in a fit, of a limit of batches that a loader without a length does not reach."""
        loop: Any = self.trainer.fit_loop
        ready, limit = loop.epoch_loop.batch_progress.current.ready, loop.max_batches
        stopped = self.trainer.should_stop or not loop._data_fetcher.done  # before the loader ended
        if self._told_short or stopped or not 0 < ready < limit or limit != self.trainer.limit_train_batches:  # type: ignore[attr-defined]
            return
        self._told_short = True
        _log.warning(
            "the training loader gave %d batches, and limit_train_batches=%d are an epoch: the run may end before its "
            "last update, and no validation follows such an epoch; give limit_train_batches=%d",
            ready,
            limit,
            ready,
        )

    def on_train_end(self) -> None:
        begun = max(1, self.trainer.current_epoch)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            # A share of max_epochs may be an epoch that a run of so many updates does not reach.
            if (
                isinstance(callback, StochasticWeightAveraging)
                and callback.n_averaged is None
                and callback.swa_start >= begun
            ):
                _log.warning(
                    "StochasticWeightAveraging has averaged no weights: it begins with epoch %d, and the run has ended "
                    "with epoch %d; give swa_epoch_start=%d or less",
                    callback.swa_start + 1,
                    begun,
                    begun,
                )

    def _check_ends(self) -> None:
        """Called when the checkpoint is loaded and when the fit starts: schedules are built before one of them."""
        schedules = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        own = [schedule.state_dict() for schedule in schedules if isinstance(schedule, WSDLRScheduler)]
        for states in zip(self._saved_schedules, own, strict=False):
            ends = (state["warmup_t"] + state["t_initial"] - state["decay_t"] for state in states)
            check_end(self._saved_update, *ends)

    def observe(self, batch: Any, examples: int) -> None:
        """Run the first examples of a batch through the body of the model: telemetry listens to its mixers."""
        read: Any = getattr(self.backbone, "forward_features", self.backbone)
        read(batch[0][:examples])

    def count_flops(self, batch: Any) -> int | None:
        """The operations of a training step on a batch of this process, None where nobody has counted them."""
        return None

    def seed_batch(self, batch_idx: int) -> tuple[int, int]:
        """Seed the draws of a training step; returns the number of the update in the run, and the part of its batch.

        An effective batch has as many parts as there are processes times accumulated batches (see `UpdateSampler`).
        """
        trainer = self.trainer
        accumulate, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        if math.isinf(batches):  # a loader without a length
            update = self.global_step
        else:
            update = self.current_epoch * self._updates(int(batches)) + batch_idx // accumulate
        part = batch_idx % accumulate * trainer.world_size + self.global_rank
        seed_generators(derive_seed(self.seed, update, part), self.device)
        return update, part

    def count_targets(self, batch: Any) -> Tensor | int | None:
        """The number of targets over which a training batch's loss is summed; None if all batches have the same number.

        A tensor `[]` on the batch's device avoids waiting for the device.
        """
        return None

    def mean_of_update(self, loss: Tensor) -> Tensor:
        """The result of a training step, from the loss `[]` summed over the batch's targets; logs `train/loss`.

        The gradient of an update is then that of the summed loss divided by the number of all its targets, over every
        process and accumulated batch, and the logged value is the mean over all of them. The module must have
        `count_targets`.
        """
        assert self._mean is not None, f"{type(self).__name__}.count_targets gives None"
        return self._mean.scale(loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.last_update is not None and self.global_step >= self.last_update:
            # Lightning ends runs after epochs: from a checkpoint of the last update, within one, it would go on.
            self.trainer.should_stop = True
            return -1  # the rest of the epoch is left out
        count = self.count_targets(self.read_batch(batch))
        if count is not None:
            self._mean = self._mean or UpdateMean()
            targets = count if isinstance(count, Tensor) else torch.full((), count, device=self.device)
            first = batch_idx % self.trainer.accumulate_grad_batches == 0
            self._mean.begin(targets, first=first, last=updated(self.trainer, batch_idx))
        return None

    def on_after_backward(self) -> None:
        # before anything reads or clips the gradients of the update
        batch_idx, accumulate = self.trainer.fit_loop.batch_idx, self.trainer.accumulate_grad_batches
        if accumulate == 1 or not updated(self.trainer, batch_idx):
            return
        parts = batch_idx % accumulate + 1
        if self._mean is not None:
            self._mean.correct(self.parameters(), accumulate)
        elif parts < accumulate:  # in the last update of an epoch; Lightning divides by the number of a whole one
            multiply_gradients(self.parameters(), accumulate / parts)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if (loss := self._loss_of_update()) is not None:
            self.log("train/loss", loss)
        # When the batch ends, the schedule has already set the next update's rate.
        self._learning_rate = max(group["lr"] for group in optimizer.param_groups)
        if self._logs_update(self.global_step + 1):
            self._gradient_norm = _gradient_norm(optimizer)
        if self.global_step + 1 == self.last_update:
            # The run ends here, with a validation. This is set before the callbacks of the batch run.
            self._validate_at_end()
            # Lightning counts the epochs itself, unless nobody knows how many there are.
            if not self._ends_an_epoch() or not self._epoch().counted:
                self.trainer.should_stop = True

    def _validate_at_end(self) -> None:
        """Let a validation follow the last update also where one follows every few epochs, and this is none of them."""
        if self.trainer.check_val_every_n_epoch is not None:
            self.trainer.check_val_every_n_epoch = 1

    def _loss_of_update(self) -> Tensor | None:
        """The loss of the update over all processes, which is logged; None for a step that logs its own."""
        return None if self._mean is None else self._mean.find_mean()

    def _ends_an_epoch(self) -> bool:
        """True if the run validates after epochs, and this update is the last one of an epoch."""
        return self.trainer.check_val_every_n_epoch is not None and self.trainer.is_last_batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if updated(self.trainer, batch_idx) and self._logs_update(self.global_step):
            metrics = {"train/lr": self._learning_rate, "train/gradient_norm": float(self._gradient_norm)}
            log_metrics(self.trainer.loggers, metrics, self.global_step - 1)

    def _logs_update(self, update: int) -> bool:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.logger is not None and update % every == 0

    def setup(self, stage: str) -> None:
        """Set the Trainer's length and validation interval, if `Training.length` defines them.

        ValueError if the Trainer keeps weights in half precision, or was given no data to train on, or several loaders
        to measure, or a callback that changes the number of accumulated batches.
        """
        trainer, length = self.trainer, self.recipe.length if self.recipe else None
        self._check_loaders(stage)
        refuse_half_weights(trainer.precision)
        widen_weights(self, trainer.precision)
        if stage == TrainerFn.FITTING and self.recipe is not None and self.has_gradients:
            _refuse_other_accumulation(trainer.callbacks)  # type: ignore[attr-defined]
        self._known_epoch, self._was_empty, self._told_short = None, False, False  # of an earlier Trainer
        if stage == TrainerFn.FITTING:
            self.last_update = None  # of an earlier fit
        if self.info is None:
            told = getattr(trainer.datamodule, "info", None)  # type: ignore[attr-defined]
            self.info = told if isinstance(told, Info) else None
        if stage != TrainerFn.FITTING or length is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        epoch = self._epoch()
        self.last_update = length.count_updates(epoch)
        # Lightning counts whole epochs; `on_before_optimizer_step` ends a run within one.
        trainer.fit_loop.max_epochs = math.ceil(self.last_update / epoch.updates) if epoch.counted else -1
        validation = length.validation
        if validation is None or validation.unit == "epochs":
            # Of a loader without a length, each update may be an epoch.
            most = trainer.fit_loop.max_epochs if epoch.counted else self.last_update
            every, shortened = length.count_validation_epochs(most)
            trainer.check_val_every_n_epoch = every
            if shortened:
                _log.warning(shortened)
        else:
            trainer.check_val_every_n_epoch = None
            updates = max(1, round(validation.in_updates(epoch)))
            trainer.val_check_interval = updates * trainer.accumulate_grad_batches  # type: ignore[attr-defined]
        self._check_after_validations()

    def _check_after_validations(self) -> None:
        """Let early stopping read a metric of validation after each validation, unless one ends each epoch.

        Lightning sets up callbacks before the module: EarlyStopping still saw a validation in each epoch, and would
        read at the end of each one a metric that is not there, or that of a validation that it has read before.
        """
        trainer = self.trainer
        if trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval == 1.0:  # type: ignore[attr-defined]
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.monitor.startswith("val/"):
                callback._check_on_train_epoch_end = False

    def _check_loaders(self, stage: str) -> None:
        """Refuse a fit without training data, and several loaders to measure, before the work.

        Those of a data module are refused by `validation_step`.
        """
        trainer: Any = self.trainer
        if stage == TrainerFn.TESTING:
            loop, step, limit = trainer.test_loop, "test_step", trainer.limit_test_batches
        elif stage == TrainerFn.VALIDATING:
            loop, step, limit = trainer.validate_loop, "validation_step", trainer.limit_val_batches
        elif stage == TrainerFn.FITTING:
            source = trainer.fit_loop._data_source.instance
            if source is self and type(self).train_dataloader is TrainedModule.train_dataloader:
                self.train_dataloader()  # here: Lightning leaves data loaders changed where its own call fails
            loop, step, limit = trainer.fit_loop.epoch_loop.val_loop, "validation_step", trainer.limit_val_batches
        else:
            return
        given, is_own = loop._data_source.instance, getattr(type(self), step) is getattr(TrainedModule, step)
        if is_own and limit != 0 and isinstance(given, list | tuple | Mapping):
            _refuse_further_loader("test" if step == "test_step" else "validate", len(given) - 1)

    def configure_optimizers(self) -> Any:
        recipe = self.recipe
        if recipe is None:
            name = type(self).__name__
            raise ValueError(
                f"this {name} only measures: to train it, make it with {name}(..., "
                "training=longseq.tasks.Training(learning_rate=1e-3))"
            )
        if isinstance(self.trainer.strategy, FSDPStrategy):
            raise ValueError(
                "FSDPStrategy gives the optimizer flat pieces of parameters, and no weight would decay: take "
                "FullyShardedStrategy of longseq.tasks.training.sharded"
            )
        optimizer = recipe.optimizer(self.backbone, lr=recipe.learning_rate, **self._fused(recipe.optimizer))
        epoch, options = self._epoch(), getattr(recipe.schedule, "keywords", {})
        if not epoch.counted:
            _refuse_spans_in_epochs(recipe)
        own_warmup = options.get("warmup_epochs") or 0
        warmup = {"warmup_epochs": own_warmup} if own_warmup else {}
        if recipe.length is None:
            total: float = self._trainer_updates(epoch)
        else:
            total = recipe.length.count_updates(epoch)
            warmup_epochs, shortened = recipe.length.count_warmup_epochs(epoch)
            warmup = warmup or {"warmup_epochs": warmup_epochs}
            if shortened and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
                _log.warning(shortened)
        if own_warmup * epoch.updates >= total and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            _log.warning(
                "the schedule's warmup_epochs=%g is no shorter than the run, which ends before the full rate",
                own_warmup,
            )
        of_timm = is_of_timm(recipe.schedule)
        lengths = {"num_epochs": _whole(total / epoch.updates), "updates_per_epoch": epoch.updates, **warmup}
        if options.get("sched") == "wsd":
            lengths = _with_whole_decay(lengths, total, options.get("decay_epochs"))
        if of_timm and options.get("warmup_prefix"):
            lengths = _without_warmup(lengths)
        for idle in (_find_idle_steps(options, total / epoch.updates), _find_idle_cycles(options) if of_timm else None):
            if idle is not None:
                _log.warning(idle)
        by_update = {"step_on_epochs": False} if of_timm else {}  # timm's default is a step after each epoch
        scheduler, _ = recipe.schedule(optimizer, **lengths, **by_update)
        if isinstance(scheduler, Scheduler) and scheduler.t_in_epochs:
            raise ValueError(
                f"the schedule is timm's {type(scheduler).__name__} in epochs, and the learning rate is set after each "
                "update: give one in updates, by create_scheduler_v2(..., step_on_epochs=False) or t_in_epochs=False"
            )
        if isinstance(scheduler, LRScheduler):
            _scale_by_layer(scheduler)
        if of_timm and isinstance(scheduler, MultiStepLRScheduler):
            # timm lets the rate fall at the last index before a milestone, which is here an update and no epoch
            scheduler.decay_t = [milestone + 1 for milestone in scheduler.decay_t]
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        plugin = self.trainer.precision_plugin
        if gradient_clip_val and isinstance(plugin, MixedPrecision) and plugin.scaler is None:
            # Lightning's plugin refuses fused optimizers, because with a loss scaler they unscale gradients after these
            # are clipped. bfloat16 has no scaler.
            algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
            Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _fused(self, optimizer: Any) -> dict[str, bool]:
        """The option of torch's optimizers with which an update on a GPU is one kernel, where it is open and serves.

        Under a loss scaler (16-mixed) a fused optimizer would scale gradients by itself, after they were clipped.
        """
        given = getattr(optimizer, "keywords", {})
        cls = getattr(optimizer, "func", None)
        if cls is create_optimizer_v2:
            cls = get_optimizer_class(given.get("opt", "sgd"), bind_defaults=False)
        takes = cls is not None and "fused" in signature(cls).parameters
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if self.device.type != "cuda" or scaled or not takes or "fused" in given or given.get("foreach"):
            return {}
        return {"fused": True}

    @property
    def epochs_trained(self) -> float:
        """The number of epochs so far; a whole number after a whole epoch."""
        return _whole(round(self.global_step / self._epoch().updates, 3))

    def _epoch(self) -> Epoch:
        """The updates and tokens of an epoch; counted once, because a stream is opened for it."""
        if self._known_epoch is None:
            self._known_epoch = self._count_epoch()
        return self._known_epoch

    def _count_epoch(self) -> Epoch:
        # trainer.estimated_stepping_batches would create the loader here, and Lightning 2.6 does not load the saved
        # state into a loader that exists already.
        trainer: Any = self.trainer
        return count_epoch(trainer, trainer.datamodule) or self._count_loader()

    def _count_loader(self) -> Epoch:
        """The epoch of a loader of the user's, or of a data module that does not count its batches."""
        loop: Any = self.trainer.fit_loop
        if self.trainer.limit_train_batches == 0:  # type: ignore[attr-defined]
            return Epoch(1)  # Lightning trains nothing, and makes no loader
        loop.setup_data()
        batches = loop.max_batches
        # Lightning makes the loader anew when the fit begins: then the length and the validation interval of this run
        # are set, and a checkpoint's state is loaded into it.
        loop._combined_loader = None
        if not math.isinf(batches):
            return Epoch(max(1, self._updates(int(batches))))
        length, steps = self.recipe.length if self.recipe else None, self.trainer.max_steps
        updates = length.updates if length is not None else steps if steps > 0 else None
        if updates is None:
            raise ValueError(
                "the training loader has no length, which a schedule needs: give the Trainer limit_train_batches, the "
                "batches of an epoch, or give max_steps (Training(length=RunLength(updates=...)) where it has a length)"
            )
        return Epoch(updates, counted=False)

    def _trainer_updates(self, epoch: Epoch) -> int:
        """The updates of a run whose length was given to the Trainer."""
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        counts = [epochs * epoch.updates] if epochs is not None and epochs >= 0 else []
        counts += [steps] if steps >= 0 else []
        if not counts:
            raise ValueError(
                "a schedule needs an end: give the Trainer max_epochs or max_steps, or the Training a length"
            )
        return min(counts)

    def _updates(self, batches: int) -> int:
        """The number of updates in an epoch of `batches`."""
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if not isinstance(scheduler, LRScheduler):
            scheduler.step_update(self.global_step)  # timm's
            return
        # Torch's know no rates by layer, nor do those of Lightning's search of a rate and of its averaging of weights.
        # Some compute a rate from the one before, others from the first one or from a highest one of their own: each
        # finds the rates that it has set itself.
        for group in scheduler.optimizer.param_groups:
            group["lr"] /= _scale_of(group) or 1.0
        scheduler.step()
        _scale_by_layer(scheduler)


def _refuse_further_loader(verb: str, index: int) -> None:
    """ValueError for any but the first loader of a stage: its metrics would be added to those of the first."""
    if index > 0:
        raise ValueError(
            f"several loaders to {verb}, and a module measures one at a time: give one of them, and measure each other "
            f"one by trainer.{verb}(module, LOADER)"
        )


def _refuse_other_accumulation(callbacks: Sequence[Any]) -> None:
    """ValueError for Lightning's callback that changes the number of accumulated batches between epochs.

    The schedule would not end with the run, and the number of an update, which its draws depend on, would come twice.
    """
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise ValueError(
                f"GradientAccumulationScheduler({callback.scheduling}) changes the updates of an epoch, over which the "
                "schedule is laid out before: leave it out, and give the Trainer accumulate_grad_batches=N"
            )


def _refuse_spans_in_epochs(recipe: Training) -> None:
    """ValueError for a warm-up or a decay in epochs where nobody knows the updates of one."""
    options = getattr(recipe.schedule, "keywords", {})
    length, epochs = recipe.length, options.get("warmup_epochs", 0.0)
    if options.get("sched") in ("step", "multistep"):
        raise ValueError(
            f"the training loader has no length, and the epochs after which sched={options['sched']} falls cannot be "
            "counted: give another schedule, such as cosine"
        )
    if length is not None and length.warmup is not None and length.warmup.unit == "epochs":
        epochs = length.warmup.count
    if epochs:
        raise ValueError(
            f"the training loader has no length, and a warm-up of {epochs:g} epochs cannot be counted: give "
            "Training(length=RunLength(updates=..., warmup_updates=...))"
        )


def _scale_by_layer(scheduler: LRScheduler) -> None:
    """Multiply the rates that a scheduler of torch has set by those of the layers (`layer_decay`)."""
    for group in scheduler.optimizer.param_groups:
        group["lr"] *= _scale_of(group)


def _mend_rates(checkpoint: Mapping[str, Any]) -> None:
    """Correct rates by layer in a checkpoint of an earlier version, which scaled them anew at each update.

    They fell to zero with schedules of torch that compute a rate from the one before. The rate that the schedule has
    set is the same for all layers, and right for those of scale 1.
    """
    mended = False
    for schedule, optimizer in zip(checkpoint["lr_schedulers"], checkpoint.get("optimizer_states") or [], strict=False):
        # Those with functions or highest rates of their own for each group may differ between groups.
        if not _RECURSIVE & schedule.keys() or {"lr_lambdas", "max_lrs"} & schedule.keys():
            continue
        bases, rates = schedule.get("base_lrs", []), schedule.get("_last_lr", [])  # timm's have others
        listed = list(zip(bases, rates, optimizer.get("param_groups", []), strict=False))
        right = {base: rate for base, rate, group in listed if _scale_of(group) == 1}
        for index, (base, rate, group) in enumerate(listed):
            wanted = right.get(base, rate)
            if _scale_of(group) and not math.isclose(rate, wanted, rel_tol=1e-6, abs_tol=1e-9 * base):
                group["lr"], rates[index], mended = wanted * _scale_of(group), wanted, True
    if mended:
        _log.warning(
            "the checkpoint is of a version that let the rates of lower layers (layer_decay) fall to zero: they are "
            "corrected from here on"
        )


def _scale_of(group: Mapping[str, Any]) -> float:
    return group.get("lr_scale", 1.0)


def _is_of_constant_rate(state: Mapping[str, Any]) -> bool:
    """Whether a schedule's state is that of timm's WSDLRScheduler."""
    return "decay_t" in state and "stable_fn" in state


def check_end(update: int, saved: float, wanted: float) -> None:
    """ValueError where a run continues to another end after its learning rate has begun to fall.

    `saved` and `wanted` are the updates from which the rate falls: in the run of the checkpoint, and in this one.
    """
    if saved != wanted and update > min(saved, wanted):
        raise ValueError(
            f"resume: the checkpoint is of update {update}, and the learning rate falls from update "
            f"{math.ceil(min(saved, wanted))} on: a run takes another length from a checkpoint before that"
        )


def _with_whole_decay(lengths: Mapping[str, Any], total: float, part: float | None) -> dict[str, Any]:
    """The lengths for timm's schedule with a constant rate, in updates: at least one is left for the decay.

    timm refuses a decay that is longer than what the warm-up leaves. In epochs, rounding can make it so.
    """
    warmup = min(round(lengths.get("warmup_epochs", 0) * lengths["updates_per_epoch"]), int(total) - 1)
    decay = max(1, round((part or DECAY) * (int(total) - warmup)))
    return {"num_epochs": int(total), "updates_per_epoch": 1, "warmup_epochs": warmup, "decay_epochs": decay}


def _without_warmup(lengths: Mapping[str, Any]) -> dict[str, Any]:
    """The lengths for a schedule of timm that begins after its warm-up: it ends with the run, too."""
    left = lengths["num_epochs"] - lengths.get("warmup_epochs", 0)
    return {**lengths, "num_epochs": max(left, 1 / lengths["updates_per_epoch"])}


def _find_idle_cycles(options: Mapping[str, Any]) -> str | None:
    """What to say of options of timm's schedules that only make a run longer; None without any."""
    given = [key for key, usual in _LENGTHENING.items() if options.get(key, usual) != usual]
    if not given:
        return None
    told = " and ".join(f"recipe.schedule.{key}={options[key]}" for key in given)
    left = " ".join(f"~recipe.schedule.{key}" for key in given)
    return (
        f"no effect of {told}: a run ends with the first cycle of its schedule, and is as long as the recipe says; "
        f"leave out: {left}"
    )


def _find_idle_steps(options: Mapping[str, Any], epochs: float) -> str | None:
    """What to say of timm's schedule in steps if the first step would come after a run's end; None otherwise."""
    kind = options.get("sched")
    key = {"step": "decay_epochs", "multistep": "decay_milestones"}.get(str(kind))
    if key is None or options.get("decay_rate") == 1.0:  # a rate of 1 is a constant learning rate, by intention
        return None
    given = options.get(key) or STEP
    first = min(given) if isinstance(given, Sequence) else given
    if first < epochs:
        return None
    return (
        f"the learning rate never falls: with recipe.schedule.sched={kind} it falls first after {first:g} epochs, and "
        f"the run has {epochs:g}; give recipe.schedule.{key}"
    )


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, as `torch.manual_seed` does for all devices.

    Without a GPU, torch.manual_seed records each of its callers for a later GPU, which takes half a millisecond per
    step.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    elif device.type == "cuda":
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The Euclidean norm `[]` of all gradients together, before they are clipped."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a model that is sharded over processes
