"""The image classification task: loss, metrics, optimizer and schedule around a plain backbone."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from longseq.tasks.callbacks.updates import updated
from longseq.tasks.image.mixing import BatchMixing
from longseq.tasks.image.sampler import derive_seed


class ImageClassifier(LightningModule):
    """Trains and measures a backbone that maps images [B, C, H, W] to logits [B, num_classes].

    Logs `train/loss`, `train/lr`, `{val,test}/{loss,top1,top5}`; top-5 only with more than five classes. Metrics count
    every evaluated sample once, whatever the number of processes. Batch-level randomness (mixing, drop path, dropout)
    is a function of (seed, micro batch, rank), so that a resumed run repeats the uninterrupted one.

    `optimizer(model, lr=...)` and `schedule(optimizer, num_epochs=..., updates_per_epoch=...)` are partials;
    `compile_mode` compiles the training pass (see `torch.compile`); the first step then takes a minute or so.
    `hyperparameters` is a plain container for the checkpoint (see `longseq.tools.checkpoint`).
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_classes: int,
        optimizer: Callable[..., torch.optim.Optimizer],
        schedule: Callable[..., tuple[Any, int]],
        learning_rate: float,
        epochs: int,
        mixing: BatchMixing,
        binary_cross_entropy: bool = False,
        seed: int = 0,
        compile_mode: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(dict(hyperparameters or {}), logger=False)
        self.backbone = backbone
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.seed = seed
        self.mixing = mixing
        self.criterion = BinaryCrossEntropy(smoothing=0.0) if binary_cross_entropy else SoftTargetCrossEntropy()
        self._learning_rate = learning_rate  # of the latest update
        self._optimizer = optimizer
        self._schedule = schedule
        # Training batches all have one shape; evaluation's do not, and runs the backbone as it is. A function and not a
        # module, so that the weights stand once in the checkpoint.
        self._train_forward = self.forward if compile_mode is None else torch.compile(self.forward, mode=compile_mode)
        self.val_metrics = _metrics(num_classes)
        self.test_metrics = _metrics(num_classes)
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self.confusion_matrix: Tensor | None = None  # counts [true class, predicted class] of the last test

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] of normalised images [B, C, H, W]."""
        return self.backbone(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        step = self.current_epoch * int(self.trainer.num_training_batches) + batch_idx
        torch.manual_seed(derive_seed(self.seed, step, self.global_rank))
        images, soft_targets = self.mixing(images, targets, step=step, rank=self.global_rank)
        loss = self.criterion(self._train_forward(images), soft_targets)
        self.log("train/loss", loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # When the batch ends, the schedule has already set the next update's rate.
        self._learning_rate = max(group["lr"] for group in optimizer.param_groups)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.logger is not None and updated(self.trainer, batch_idx) and self.global_step % every == 0:
            self.logger.log_metrics({"train/lr": self._learning_rate}, step=self.global_step - 1)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self._evaluate(batch, self.val_metrics, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        logits = self._evaluate(batch, self.test_metrics, "test")
        if logits is not None:
            self.confusion.update(logits, batch[1])
        return logits

    def _evaluate(self, batch: tuple[Tensor, Tensor], metrics: Any, stage: str) -> Tensor | None:
        """Updates the metrics of a stage and returns the logits, None for an empty share of a distributed batch."""
        images, targets = batch
        logits = None
        if len(targets) > 0:
            logits = self(images).float()
            loss = nn.functional.cross_entropy(logits, targets)
            for name, metric in metrics.items():
                if name == "loss":
                    metric.update(loss, weight=len(targets))
                else:
                    metric.update(logits, targets)
        for name, metric in metrics.items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)
        return logits

    def on_test_epoch_end(self) -> None:
        self.confusion_matrix = self.confusion.compute().cpu()
        self.confusion.reset()

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.backbone, lr=self.learning_rate)
        scheduler, _ = self._schedule(optimizer, num_epochs=self.epochs, updates_per_epoch=self._updates_per_epoch())
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _updates_per_epoch(self) -> int:
        # trainer.estimated_stepping_batches would make the loader here, and Lightning 2.6 gives a loader that exists
        # already no state to resume from.
        batches = self.trainer.datamodule.batches_per_epoch  # type: ignore[attr-defined]
        limit = self.trainer.limit_train_batches
        if limit is not None:
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return max(1, math.ceil(batches / self.trainer.accumulate_grad_batches))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)


def _metrics(num_classes: int) -> nn.ModuleDict:
    metrics: dict[str, Metric] = {
        "loss": MeanMetric(nan_strategy="disable"),
        "top1": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
    }
    if num_classes > 5:
        metrics["top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro", validate_args=False)
    return nn.ModuleDict(metrics)
