"""The image classification task: loss, metrics, optimizer and schedule around a backbone."""

from collections.abc import Mapping
from typing import Any

from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.mixing import BatchMixing
from longseq.tasks.training.metrics import MeanLoss
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training


class ImageClassifier(TrainedModule):
    """Trains and evaluates a backbone that maps images [B, C, H, W] to logits [B, num_classes].

    Logs `train/loss`, `train/lr`, `{val,test}/{loss,top1,top5}`; top-5 only with more than five classes. Metrics count
    each evaluated sample once, whatever the number of processes. `mixing` makes the soft targets of a training batch;
    by default they are the labels. With `binary_cross_entropy`, each class is a separate decision.
    """

    # Counts [true class, predicted class] of the last test.
    confusion_matrix: Tensor | None = None

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_classes: int,
        training: Training | None = None,
        mixing: BatchMixing | None = None,
        binary_cross_entropy: bool = False,
    ) -> None:
        super().__init__(backbone, training)
        self.mixing = mixing or BatchMixing(num_classes, seed=self.seed)
        self.criterion = BinaryCrossEntropy(smoothing=0.0) if binary_cross_entropy else SoftTargetCrossEntropy()
        # Training batches all have the same shape. Evaluation batches do not, and run the backbone without compilation.
        self._train_forward = self.compiled(self.forward)
        self.val_metrics = _metrics(num_classes)
        self.test_metrics = _metrics(num_classes)
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self._measured = False  # True if an image was evaluated since the last validation or test

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], backbone: nn.Module, info: DataInfo, training: Training | None
    ) -> "ImageClassifier":
        if training is None:
            return cls(backbone, num_classes=info.num_classes)
        loss, augment = config["recipe"]["loss"], config["recipe"]["augment"]
        mixing = BatchMixing(
            info.num_classes,
            seed=training.seed,
            label_smoothing=loss["label_smoothing"],
            **augment.get("mixing", {}),
        )
        return cls(
            backbone,
            num_classes=info.num_classes,
            training=training,
            mixing=mixing,
            binary_cross_entropy=loss.get("bce", False),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] for normalised images [B, C, H, W]."""
        return self.backbone(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        update, part = self.seed_batch(batch_idx)
        images, soft_targets = self.mixing(images, targets, update=update, part=part)
        loss = self.criterion(self._train_forward(images), soft_targets)
        self.log("train/loss", loss.detach())
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        logits = super().test_step(batch, batch_idx)
        if logits is not None:
            self.confusion.update(logits, batch[1])
        return logits

    def evaluate_batch(self, batch: tuple[Tensor, Tensor], metrics: Any, stage: str) -> Tensor | None:
        """Update the metrics of a stage and return the logits, or None for an empty part of a distributed batch."""
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
        """Raise ValueError if no process of the run could read an image; a stream shows this only at its end."""
        measured, self._measured = self._measured, False
        if not self.trainer.strategy.reduce_boolean_decision(measured, all=False):
            raise ValueError(f"not one {kind} image could be read: check data.root and the names of the splits")


def _metrics(num_classes: int) -> nn.ModuleDict:
    metrics: dict[str, Metric] = {
        "loss": MeanLoss(),
        "top1": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
    }
    if num_classes > 5:
        metrics["top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro", validate_args=False)
    return nn.ModuleDict(metrics)
