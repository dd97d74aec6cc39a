"""The image classification task: loss, metrics, optimizer and schedule around a backbone."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from lightning.pytorch.trainer.states import TrainerFn
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix, MultilabelConfusionMatrix

from longseq.models import CHECKPOINT_RUN
from longseq.tasks.data.given import IMAGES, TARGETS, as_pair, find_entry
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.mixing import BatchMixing
from longseq.tasks.image.model import state_data, state_decision
from longseq.tasks.training.classification import (
    dense_counts,
    make_metrics,
    reads_decisions,
    sparse_counts,
    update_metrics,
)
from longseq.tasks.training.decisions import Criterion, Scores, decide
from longseq.tasks.training.metrics import MeanLoss
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training


class ImageClassifier(TrainedModule):
    """Trains and evaluates a backbone that maps images [B, C, H, W] to logits [B, num_classes].

    Logs `train/loss`, `train/lr`, `{val,test}/{loss,top1,top5,f1,balanced_accuracy}`; top-5 only with more than five
    classes. With `multi_label` an image has any number of the classes, targets are `[B, num_classes]` of 0 and 1, and
    the logged metrics are `{loss,accuracy,f1,f1_micro,average_precision}` (see
    `longseq.tasks.training.classification`). `chosen_metrics` and `metric` add others, as `task.metrics` and
    `task.metric` do. Metrics count each evaluated sample once, whatever the number of processes.

    `mixing` makes the soft targets of a training batch; by default they are the labels. With `binary_cross_entropy`, or
    several labels, each class is a separate decision. Losses of validation and test have no weights.

    `threshold` is the probability from which a label is given, or the second one of two classes: a number, a number for
    each label, or the criterion by which each validation chooses it (see
    `longseq.tasks.training.decisions.choose_threshold`). `thresholds` are those in force, and checkpoints keep them.
    Metrics of a validation are of the thresholds that it chose.

    Batches of any loader are pairs (images, labels), or dictionaries with the names of `read_batch`. Images are
    normalised; labels are numbers `[B]`, or probabilities of the classes `[B, num_classes]`, which are not smoothed or
    mixed again; several labels are as above. `info` states the names of the classes and the preprocessing with which
    the loader makes images: a checkpoint holds it for `longseq predict`, `evaluate` and `export`. Without it these take
    what the model states (timm's `pretrained_cfg`), and of an `ImageDataModule` its own.
    """

    kept_options = ("binary_cross_entropy",)

    # Counts [true class, predicted class] of the last test, and of the last validation; of several labels [C, 2, 2].
    # After a checkpoint was loaded, the validation is the one before that checkpoint.
    confusion_matrix: Tensor | None = None
    val_confusion_matrix: Tensor | None = None

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
        super().__init__(backbone, training)
        if info is not None and info.num_classes != num_classes:
            raise ValueError(f"num_classes={num_classes}, and info has {info.num_classes} classes: give one number")
        self.info = info
        self.num_classes, self.binary_cross_entropy = num_classes, binary_cross_entropy
        weights = None
        if info is not None:
            multi_label, weights = multi_label or info.multi_label, info.class_weights
            threshold = info.thresholds if threshold is None else threshold
        self.multi_label = multi_label
        self.mixing = mixing or BatchMixing(num_classes, seed=self.seed, multi_label=multi_label, class_weights=weights)
        self._decides_each = binary_cross_entropy or multi_label
        self.criterion = BinaryCrossEntropy(smoothing=0.0) if self._decides_each else SoftTargetCrossEntropy()
        # Training batches all have the same shape. Evaluation batches do not, and run the backbone without compilation.
        self._train_forward = self.compiled(self.forward)
        self.val_metrics, self.test_metrics = (
            _metrics(num_classes, multi_label=multi_label, chosen=chosen_metrics, metric=metric) for _ in range(2)
        )
        confusion = MultilabelConfusionMatrix if multi_label else MulticlassConfusionMatrix
        self.confusion: Metric = confusion(num_classes, validate_args=False)
        # no buffer, which an average of the weights would include
        self.thresholds: Tensor | None = _given_thresholds(threshold, num_classes, multi_label)
        self._criterion: Criterion | None = threshold if isinstance(threshold, str) else None
        self._scores = Scores() if self._criterion else None
        self._measured = False  # True if an image was evaluated since the last validation or test

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], backbone: nn.Module, info: DataInfo, training: Training | None
    ) -> "ImageClassifier":
        task = config.get("task") or {}
        measured: dict[str, Any] = {
            "num_classes": info.num_classes,
            "multi_label": info.multi_label,
            "chosen_metrics": task.get("metrics"),
            "metric": task.get("metric"),
        }
        if training is None:
            return cls(backbone, **measured, threshold=info.thresholds)
        loss, augment = config["recipe"]["loss"], config["recipe"]["augment"]
        mixing = BatchMixing(
            info.num_classes,
            seed=training.seed,
            label_smoothing=loss["label_smoothing"],
            class_weights=info.class_weights,
            multi_label=info.multi_label,
            **augment.get("mixing", {}),
        )
        return cls(
            backbone,
            **measured,
            threshold=task.get("threshold"),
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
        if self.multi_label:
            return images, targets.float()
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
        if targets.ndim == 2 and not self.multi_label:
            soft_targets, weights = targets, None
        else:
            images, soft_targets, weights = self.mixing(images, targets, update=update, part=part)
        logits = self._train_forward(images)
        loss = (
            self.criterion(logits, soft_targets) if weights is None else self._weighted(logits, soft_targets, weights)
        )
        self.log("train/loss", loss.detach())
        return loss

    def _weighted(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The mean over the batch of the losses, each with its weight."""
        if self._decides_each:
            losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        else:
            losses = functional.cross_entropy(logits, targets, reduction="none").unsqueeze(1)
        return (weights * losses).mean()

    def evaluate_batch(self, batch: tuple[Tensor, Tensor], metrics: Any, stage: str) -> Tensor | None:
        """Update the metrics of a stage and return the logits, or None for an empty part of a distributed batch."""
        images, targets = batch
        logits = None
        if len(targets) > 0:
            self._measured = True
            logits = self(images).float()
            if self.multi_label:
                loss = functional.binary_cross_entropy_with_logits(logits, targets)
            else:
                loss = functional.cross_entropy(logits, targets)
            metrics["loss"].update(loss, weight=len(targets))
        self._measure(logits, targets, metrics, stage)
        return logits

    def decide(self, logits: Tensor) -> Tensor:
        """The classes `[B]` of logits `[B, C]`, or `[B, C]` of several labels, by the thresholds in force."""
        return decide(self._probabilities(logits), self.thresholds, multi_label=self.multi_label)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.multi_label else logits.float().softmax(dim=1)

    def _measure(self, logits: Tensor | None, targets: Tensor, metrics: Any, stage: str) -> None:
        """Add a batch to the metrics of a stage, and log them."""
        if logits is None:
            probabilities = torch.zeros(0, self.num_classes, device=targets.device)
        else:
            probabilities = self._probabilities(logits)
        wanted = targets.long() if self.multi_label else _class_numbers(targets)
        if self._scores is None or stage != "val":
            self._count(metrics, probabilities, wanted)
            self._log_metrics(metrics, stage)
            return
        # what depends on the threshold is counted after the last batch
        self._scores.update(probabilities, wanted)
        others = {name: metric for name, metric in metrics.items() if not reads_decisions(metric)}
        update_metrics(others, probabilities, wanted, wanted)
        self._log_metrics(others, stage)

    def _count(self, metrics: Mapping[str, Any], probabilities: Tensor, wanted: Tensor) -> None:
        """Add samples to metrics, and their decisions to the confusion matrix."""
        decisions = decide(probabilities, self.thresholds, multi_label=self.multi_label)
        update_metrics(metrics, probabilities, decisions, wanted)
        if len(wanted):
            self.confusion.update(decisions, wanted)

    def _log_metrics(self, metrics: Mapping[str, Any], stage: str) -> None:
        for name, metric in metrics.items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self._require_measured("validation")
        if self._scores is not None and self._criterion is not None:
            self.thresholds = self._scores.choose(self._criterion, multi_label=self.multi_label)
            decided = {name: metric for name, metric in self.val_metrics.items() if reads_decisions(metric)}  # type: ignore[arg-type]
            self._count(decided, *self._scores.own())
            self._log_metrics(decided, "val")
            self._scores.reset()
        self.val_confusion_matrix = self._finish_confusion()

    def on_test_epoch_end(self) -> None:
        self._require_measured("test")
        self.confusion_matrix = self._finish_confusion()

    def _finish_confusion(self) -> Tensor:
        counts: Tensor = self.confusion.compute().cpu()
        self.confusion.reset()
        return counts

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        thresholds = None if self.thresholds is None else self.thresholds.tolist()
        state_decision(self.backbone, multi_label=self.multi_label, thresholds=thresholds)
        super().on_save_checkpoint(checkpoint)
        if thresholds is not None:
            run = checkpoint.get(CHECKPOINT_RUN) or {}
            if "data" in run:
                checkpoint[CHECKPOINT_RUN] = {**run, "data": {**run["data"], "thresholds": thresholds}}
            checkpoint["thresholds"] = thresholds
        if self.val_confusion_matrix is not None:
            checkpoint["val_confusion_matrix"] = sparse_counts(self.val_confusion_matrix)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if (thresholds := checkpoint.get("thresholds")) is not None:
            self.thresholds = torch.tensor(thresholds)
        if (counts := checkpoint.get("val_confusion_matrix")) is not None:
            self.val_confusion_matrix = dense_counts(counts)

    def _require_measured(self, kind: str) -> None:
        """Raise ValueError if no process of the run could read an image; a stream shows this only at its end."""
        measured, self._measured = self._measured, False
        if not self.trainer.strategy.reduce_boolean_decision(measured, all=False):
            raise ValueError(f"not one {kind} image could be read: check data.root and the names of the splits")


def _class_numbers(targets: Tensor) -> Tensor:
    """Class numbers `[B]`, of probabilities of the classes the most probable ones."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets


def _metrics(num_classes: int, **options: Any) -> nn.ModuleDict:
    return nn.ModuleDict({"loss": MeanLoss(), **make_metrics(num_classes, **options)})


def _given_thresholds(threshold: Any, num_classes: int, multi_label: bool) -> Tensor | None:
    """The thresholds as `decide` takes them, None where none are given. ValueError for those that do not fit."""
    if threshold is None:
        return None
    if not multi_label and num_classes != 2:
        raise ValueError(
            f"task.threshold={threshold} decides between two classes or about several labels, and there are "
            f"{num_classes} classes: leave it null, which takes the most probable one"
        )
    if isinstance(threshold, str):
        if threshold not in get_args(Criterion):
            raise ValueError(f"threshold={threshold} is unknown: give a number, or one of {get_args(Criterion)}")
        return None
    places = num_classes if multi_label else 1
    values = [threshold] * places if isinstance(threshold, float | int) else list(threshold)
    if len(values) != places:
        raise ValueError(f"task.threshold has {len(values)} numbers: give one, or one for each of the {places} labels")
    return torch.tensor([float(value) for value in values])
