"""The image classification task: loss, metrics, optimizer and schedule around a backbone."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from longseq.tasks.data.given import TARGETS, as_pair, find_entry
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.mixing import BatchMixing
from longseq.tasks.image.model import state_data
from longseq.tasks.training.metrics import MeanLoss
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training

# What other libraries call the images of a batch.
IMAGES = ("images", "image", "pixel_values", "img", "x")


class ImageClassifier(TrainedModule):
    """Trains and evaluates a backbone that maps images [B, C, H, W] to logits [B, num_classes].

    Logs `train/loss`, `train/lr`, `{val,test}/{loss,top1,top5}`; top-5 only with more than five classes. Metrics count
    each evaluated sample once, whatever the number of processes. `mixing` makes the soft targets of a training batch;
    by default they are the labels. With `binary_cross_entropy`, each class is a separate decision.

    Batches of any loader are pairs (images, labels), or dictionaries with the names of `read_batch`. Images are
    normalised; labels are numbers `[B]`, or probabilities of the classes `[B, num_classes]`, which are not smoothed or
    mixed again. `info` states the names of the classes and the preprocessing with which the loader makes images: a
    checkpoint holds it for `longseq predict`, `evaluate` and `export`. Without it these take what the model states
    (timm's `pretrained_cfg`), and of an `ImageDataModule` its own.
    """

    kept_options = ("binary_cross_entropy",)

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
        info: DataInfo | None = None,
    ) -> None:
        super().__init__(backbone, training)
        if info is not None and info.num_classes != num_classes:
            raise ValueError(f"num_classes={num_classes}, and info has {info.num_classes} classes: give one number")
        self.info = info
        self.num_classes, self.binary_cross_entropy = num_classes, binary_cross_entropy
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

    @classmethod
    def arguments_for(cls, backbone: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
        info = DataInfo.from_dict(data)
        return {"num_classes": info.num_classes, "info": info}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == TrainerFn.FITTING and self.info is not None:
            state_data(self.backbone, self.info)

    def read_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(images, labels) of a pair, or of a dictionary: images, image, pixel_values, img or x, and labels, label,
        targets, target or y. A batch to predict needs no labels.
        """
        if isinstance(batch, Mapping):
            images = find_entry(batch, IMAGES, "images")
            targets = None if self._predicts() else find_entry(batch, TARGETS, "labels")
        elif self._predicts():
            images, targets = batch if isinstance(batch, Tensor) else batch[0], None
        else:
            images, targets = as_pair(batch, "images, labels")
        if targets is None:
            targets = torch.zeros(len(images), dtype=torch.long)
        if targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets.flatten()
        return images, targets if targets.ndim == 2 else targets.long()

    def _predicts(self) -> bool:
        return self._trainer is not None and self.trainer.predicting

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logits `[B, num_classes]` of the images of a batch, with labels or without."""
        return self(self.read_batch(batch)[0])

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] for normalised images [B, C, H, W]."""
        return self.backbone(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = self.read_batch(batch)
        update, part = self.seed_batch(batch_idx)
        if targets.ndim == 2:
            soft_targets = targets
        else:
            images, soft_targets = self.mixing(images, targets, update=update, part=part)
        loss = self.criterion(self._train_forward(images), soft_targets)
        self.log("train/loss", loss.detach())
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        logits = super().test_step(batch, batch_idx)
        if logits is not None:
            self.confusion.update(logits, _class_numbers(self.read_batch(batch)[1]))
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
                    metric.update(logits, _class_numbers(targets))
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


def _class_numbers(targets: Tensor) -> Tensor:
    """Class numbers `[B]`, of probabilities of the classes the most probable ones."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets


def _metrics(num_classes: int) -> nn.ModuleDict:
    metrics: dict[str, Metric] = {
        "loss": MeanLoss(),
        "top1": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
    }
    if num_classes > 5:
        metrics["top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro", validate_args=False)
    return nn.ModuleDict(metrics)
