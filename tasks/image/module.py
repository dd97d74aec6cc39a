"""The image classification task: loss, metrics, optimizer and schedule around a plain backbone."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from longseq.tasks.image.mixing import BatchMixing
from longseq.tasks.training.metrics import WeightedMean
from longseq.tasks.training.module import TrainedModule


class ImageClassifier(TrainedModule):
    """Trains and measures a backbone that maps images [B, C, H, W] to logits [B, num_classes].

    Logs `train/loss`, `train/lr`, `{val,test}/{loss,top1,top5}`; top-5 only with more than five classes. Metrics count
    every evaluated sample once, whatever the number of processes. `compile_mode` compiles the training pass (see
    `torch.compile`); the first step then takes a minute or so. The further arguments are those of `TrainedModule`.
    """

    headline = ("top1", "top5", "loss")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_classes: int,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        schedule: Callable[..., tuple[Any, int]] | None,
        learning_rate: float,
        epochs: int,
        mixing: BatchMixing,
        binary_cross_entropy: bool = False,
        seed: int = 0,
        compile_mode: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            backbone,
            optimizer=optimizer,
            schedule=schedule,
            learning_rate=learning_rate,
            epochs=epochs,
            seed=seed,
            hyperparameters=hyperparameters,
        )
        self.mixing = mixing
        self.criterion = BinaryCrossEntropy(smoothing=0.0) if binary_cross_entropy else SoftTargetCrossEntropy()
        # Training batches all have one shape; evaluation's do not, and runs the backbone as it is. A function and not a
        # module, so that the weights stand once in the checkpoint.
        self._train_forward = self.forward if compile_mode is None else torch.compile(self.forward, mode=compile_mode)
        self.val_metrics = _metrics(num_classes)
        self.test_metrics = _metrics(num_classes)
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self._measured = False  # an image since the last validation or test

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] of normalised images [B, C, H, W]."""
        return self.backbone(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        update, part = self.seed_batch(batch_idx)
        images, soft_targets = self.mixing(images, targets, update=update, part=part)
        loss = self.criterion(self._train_forward(images), soft_targets)
        self.log("train/loss", loss.detach())
        return loss

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
            self._measured = True
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

    def on_validation_epoch_end(self) -> None:
        self._require_measured("validation")

    def on_test_epoch_end(self) -> None:
        self._require_measured("test")
        self.confusion_matrix = self.confusion.compute().cpu()
        self.confusion.reset()

    def _require_measured(self, kind: str) -> None:
        """ValueError where no process of the run could read an image, as a stream tells at its end only."""
        measured, self._measured = self._measured, False
        if not self.trainer.strategy.reduce_boolean_decision(measured, all=False):
            raise ValueError(f"not one {kind} image could be read: check data.root and the names of the splits")


def _metrics(num_classes: int) -> nn.ModuleDict:
    metrics: dict[str, Metric] = {
        "loss": WeightedMean(),
        "top1": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
    }
    if num_classes > 5:
        metrics["top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro", validate_args=False)
    return nn.ModuleDict(metrics)
