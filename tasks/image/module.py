"""The image classification task: loss, metrics, optimizer and schedule around a backbone, and its report."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional

from longseq.tasks.config import Criterion
from longseq.tasks.data.loader import IMAGES, TARGETS, check_class_numbers, check_several_labels, find_entry
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.model import state_data, state_decision
from longseq.tasks.image.transforms import BatchMixing, normalize
from longseq.tasks.training.classifier import ClassifierModule, ClassReport
from longseq.tasks.training.distributed import UpdateSum, count_processes
from longseq.tasks.training.recipe import Training

_ROUNDING = 0.02  # the largest rounding error of a sum of probabilities in half precision


class ImageReport(ClassReport):
    """The figures of each class, the headline of images, and the command that exports the model."""

    unit = "images"
    headline = ("top1", "top5", "accuracy", "f1", "f1_micro", "balanced_accuracy", "average_precision", "loss")

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq export {checkpoint} format=onnx"]


class ImageClassifier(ClassifierModule):
    """Trains and evaluates a backbone that maps images [B, C, H, W] to logits [B, num_classes].

    Logs `train/loss`, `train/lr` and `{val,test}/{loss,top1,top5,f1,balanced_accuracy}`; top-5 for more than five
    classes. With `multi_label`, targets are `[B, num_classes]` of 0 and 1, and the metrics are
    `{loss,accuracy,f1,f1_micro,average_precision}`. `chosen_metrics` and `metric` add others, as `task.metrics` and
    `task.metric` do. Metrics count each evaluated sample once, whatever the number of processes; with other loaders
    than longseq's they include the samples that Lightning repeats to give all processes equally many.

    `mixing` makes the soft targets of a training batch; by default they are the labels. With `binary_cross_entropy` or
    several labels, each class is a decision. Evaluation has no weights. `threshold` is as in `ClassifierModule`.

    Batches of any loader are pairs (normalised images, labels), or dictionaries with the names of `read_batch`. Labels
    are class numbers `[B]`; or probabilities `[B, num_classes]`, which get the weights of the classes, but no smoothing
    or mixing; or several labels as above. ValueError for other labels. `info` has the class names and the preprocessing
    of the images; checkpoints keep it for `longseq predict`, `evaluate` and `export`. By default it is the info of an
    `ImageDataModule`, or comes from timm's `pretrained_cfg` of the model.
    """

    kept_options = ("num_classes", "multi_label", "binary_cross_entropy", "chosen_metrics", "metric", "threshold")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_classes: int,
        training: Training | None = None,
        mixing: BatchMixing | None = None,
        binary_cross_entropy: bool = False,
        multi_label: bool = False,
        chosen_metrics: Mapping[str, Any] | None = None,
        metric: str | None = None,
        threshold: float | Sequence[float] | Criterion | None = None,
        info: DataInfo | None = None,
    ) -> None:
        if info is not None and info.num_classes != num_classes:
            raise ValueError(f"num_classes={num_classes}, and info has {info.num_classes} classes")
        weights = thresholds = None
        if info is not None:
            multi_label, weights, thresholds = multi_label or info.multi_label, info.class_weights, info.thresholds
        given: dict[str, Any] = {"chosen_metrics": chosen_metrics, "metric": metric, "threshold": threshold}
        given |= {"num_classes": num_classes, "multi_label": multi_label, "thresholds": thresholds}
        super().__init__(backbone, training, **given)
        self.info = info
        self.binary_cross_entropy = binary_cross_entropy
        self.mixing = mixing or BatchMixing(num_classes, seed=self.seed, multi_label=multi_label, class_weights=weights)
        self._decides_each = binary_cross_entropy or multi_label
        self.criterion = BinaryCrossEntropy(smoothing=0.0) if self._decides_each else SoftTargetCrossEntropy()
        # Evaluation batches differ in shape, so only training is compiled.
        self._train_forward = self.compiled(self.forward)
        self._checked: set[bool] = set()  # whether labels of training (True) and evaluation (False) were checked
        self._losses = UpdateSum()  # of the batches of an update
        self._parts = 0  # the number of these batches in each process

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], backbone: nn.Module, info: DataInfo, training: Training | None
    ) -> "ImageClassifier":
        task = config.get("task") or {}
        given: dict[str, Any] = {"num_classes": info.num_classes, "info": info, "metric": task.get("metric")}
        given["chosen_metrics"] = task.get("metrics")
        if training is None:
            return cls(backbone, **given)
        loss, augment = config["recipe"]["loss"], config["recipe"]["augment"]
        options = {"class_weights": info.class_weights, "multi_label": info.multi_label, **augment.get("mixing", {})}
        mixing = BatchMixing(info.num_classes, seed=training.seed, label_smoothing=loss["label_smoothing"], **options)
        given |= {"threshold": task.get("threshold"), "binary_cross_entropy": loss.get("bce", False)}
        return cls(backbone, **given, training=training, mixing=mixing)

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

        8-bit images are normalised if the module has an `info`, and are otherwise kept.
        """
        if isinstance(batch, Mapping):
            images = find_entry(batch, IMAGES, "images")
            targets = None if self.predicts else find_entry(batch, TARGETS, "labels")
        elif self.predicts:
            images, targets = batch if isinstance(batch, Tensor) else batch[0], None
        else:
            images, targets = batch
        if self.info is not None and isinstance(images, Tensor) and images.dtype == torch.uint8:
            images = normalize(images, self.info)
        if targets is None:
            targets = torch.zeros(len(images), dtype=torch.long)
            return images, targets.float() if self.multi_label else targets
        if not self.multi_label and targets.ndim == 2 and targets.shape[1] == 1:
            targets = targets.flatten()
        self._check_labels(targets)
        if self.multi_label:
            return images, targets.float()
        if targets.ndim == 1:
            return images, targets.long()
        return images, targets if targets.is_floating_point() else targets.float()

    def _check_labels(self, targets: Tensor) -> None:
        """ValueError for labels that do not fit the classes; of batches on a device, only the first is read."""
        if targets.shape[1:] != ((self.num_classes,) if self.multi_label or targets.ndim != 1 else ()):
            wanted = f"[B, {self.num_classes}] of 0 and 1" if self.multi_label else f"[B] or [B, {self.num_classes}]"
            raise ValueError(f"the labels of a batch are {list(targets.shape)}, and must be {wanted}")
        if not targets.numel() or (targets.device.type != "cpu" and self.training in self._checked):
            return
        self._checked.add(self.training)
        if self.multi_label:
            check_several_labels(targets, exact=not self.training)
        elif targets.ndim == 1:
            check_class_numbers(targets, self.num_classes)
        elif float(targets.min()) < 0 or not bool(((targets.float().sum(1) - 1).abs() <= _ROUNDING).all()):
            raise ValueError("a row of labels is no distribution over the classes: see data.multi_label")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Logits `[B, num_classes]` of the images of a batch, with labels or without."""
        images = self.read_batch(batch)[0]  # empty if no image of the batch can be read
        return self(images) if len(images) else torch.zeros(0, self.num_classes, device=self.device)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] for normalised images [B, C, H, W]."""
        return self.backbone(images.double() if self.dtype == torch.float64 else images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = self.read_batch(batch)
        update, part = self.seed_batch(batch_idx)
        if targets.ndim == 2 and not self.multi_label:
            soft, weights = self.mixing.weigh(targets)
        else:
            images, soft, weights = self.mixing(images, targets, update=update, part=part)
        logits = self._of_classes(self._train_forward(images))
        loss = self.criterion(logits, soft) if weights is None else self._weighted(logits, soft, weights)
        turn = batch_idx % self.trainer.accumulate_grad_batches
        self._losses.add(loss, first=turn == 0)
        self._parts = turn + 1
        return loss

    def _loss_of_update(self) -> Tensor | None:
        summed = self._losses.find()
        return None if summed is None else summed / (self._parts * count_processes())

    def _of_classes(self, logits: Any) -> Tensor:
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] != self.num_classes:
            raise ValueError(f"the model must give [B, {self.num_classes}], a logit for each class")
        return logits

    def _weighted(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        if self._decides_each:
            losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        else:
            losses = functional.cross_entropy(logits, targets, reduction="none").unsqueeze(1)
        return (weights * losses).mean()

    def evaluate_batch(self, batch: tuple[Tensor, Tensor], metrics: Any, stage: str) -> None:
        """Update the metrics of a stage; a process's part of a distributed batch may be empty."""
        images, targets = batch
        logits = torch.zeros(0, self.num_classes, device=targets.device)
        if len(targets) > 0:
            logits = self._of_classes(self(images)).float()
            if self.multi_label:
                loss = functional.binary_cross_entropy_with_logits(logits, targets)
            else:
                loss = functional.cross_entropy(logits, targets)
            metrics["loss"].update(loss, weight=len(targets))
        is_distribution = targets.ndim == 2 and not self.multi_label
        classes = targets.argmax(dim=1) if is_distribution else targets.long()
        self.measure(self.rankable(logits), classes, metrics, stage)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        thresholds = None if self.thresholds is None else self.thresholds.tolist()
        state_decision(self.backbone, multi_label=self.multi_label, thresholds=thresholds)
        super().on_save_checkpoint(checkpoint)
