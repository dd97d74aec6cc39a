"""The task of a document classifier: the class, or the labels, of each document of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import functional

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.linear_text import LinearTextClassifier
from longseq.backbones.segments import check_segments, read_in_segments
from longseq.kernels.packing import Packing
from longseq.models import CHECKPOINT_CONFIG, build
from longseq.tasks.config import Criterion, read
from longseq.tasks.data import loader
from longseq.tasks.document.batch import DocumentBatch, DocumentInputs
from longseq.tasks.document.config import DocumentInfo, LinearModelKeys
from longseq.tasks.document.model import fit_linear, read_documents
from longseq.tasks.document.report import TABLES, AccuracyByLength
from longseq.tasks.training.classifier import ClassifierModule
from longseq.tasks.training.recipe import Training
from longseq.tasks.training.token_model import PluginMixers


class DocumentTask(ClassifierModule):
    """Trains and measures a classifier on documents; `read_batch` lists the batches that it reads.

    The loss of a document is the cross-entropy of its class, or the mean of the binary cross-entropies of all labels.
    An update minimises `train/loss`, the mean over all of its documents. The `class_weights` of `info` multiply the
    loss of a document by the weight of its class, or the cross-entropy of each label that it has by the label's.
    `label_smoothing` spreads a part of the target's probability evenly over the classes, or moves the target of each
    label towards 1/2. Losses of validation and test have neither.

    Logs `train/{loss,lr}`, `{val,test}/loss` and `{val,test}/METRIC` for the metrics of
    `longseq.tasks.document.report.TABLES`, and in a test `test/accuracy_q1` to `test/accuracy_q4` for the quarters of
    the documents by length. `chosen_metrics` and `metric` add others, as `task.metrics` and `task.metric` do.
    `threshold` is as in `ClassifierModule`, by default the thresholds of `info`. After a test, `documents_by_length`
    counts the documents of each quarter, and `length_quartiles` are the limits in tokens before truncation.
    """

    kept_options = ("label_smoothing", "chosen_metrics", "metric", "threshold")
    tables = TABLES

    documents_by_length: Mapping[str, int] | None = None
    length_quartiles: Sequence[int] = ()

    def __init__(
        self,
        backbone: nn.Module,
        *,
        info: DocumentInfo,
        label_smoothing: float = 0.0,
        chosen_metrics: Mapping[str, Any] | None = None,
        metric: str | None = None,
        threshold: float | Sequence[float] | Criterion | None = None,
        training: Training | None = None,
    ) -> None:
        given: dict[str, Any] = {"chosen_metrics": chosen_metrics, "metric": metric, "threshold": threshold}
        given |= {"num_classes": info.num_classes, "multi_label": info.multi_label, "thresholds": info.thresholds}
        super().__init__(backbone, training, **given)
        self.info = info
        self.label_smoothing = label_smoothing
        self._class_weights: Tensor | None
        weights = None if info.class_weights is None else torch.tensor(info.class_weights)
        self.register_buffer("_class_weights", weights, persistent=False)
        self._train_read = self.compiled(self._read)
        if info.segment and not isinstance(backbone, LinearTextClassifier):
            check_segments(backbone, info.gradient_segments, info.segment)
        self._plugin_mixers = PluginMixers()
        self._by_length = AccuracyByLength()

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], backbone: nn.Module, info: DocumentInfo, training: Training | None
    ) -> DocumentTask:
        task = config.get("task") or {}
        measured: dict[str, Any] = {"chosen_metrics": task.get("metrics"), "metric": task.get("metric")}
        measured["threshold"] = task.get("threshold") if training else None
        if isinstance(backbone, LinearTextClassifier):
            keys = read(LinearModelKeys, config["model"], "model") if training else None
            return LinearTask(backbone, info=info, keys=keys, training=training, **measured)
        loss = (config["recipe"].get("loss") if training else None) or {}
        smoothing = loss.get("label_smoothing", 0.0)
        return cls(backbone, info=info, label_smoothing=smoothing, training=training, **measured)

    @classmethod
    def arguments_for(cls, backbone: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
        return {"info": DocumentInfo.from_dict(data)}

    def read_batch(self, batch: Any) -> DocumentBatch:
        """A batch of longseq's loaders, or one made from tokens `[N, T]` and classes `[N]` or labels `[N, C]`.

        The latter are a pair, for documents of one length, or a dictionary as in transformers: `input_ids`, `labels`,
        and `attention_mask`. A batch to predict needs no labels. Documents should begin with the separator of `info`.
        """
        if isinstance(batch, tuple | list) and isinstance(batch[0], DocumentInputs):
            return batch[0], batch[1]
        if isinstance(batch, Mapping):
            tokens = loader.find_entry(batch, ("input_ids", "tokens"), "tokens")
            mask = loader.read_mask(batch, tokens)
        else:
            tokens = batch if isinstance(batch, Tensor) else batch[0]
            mask = torch.ones_like(tokens, dtype=torch.bool)
        if self.predicts:
            targets = tokens.new_zeros((len(tokens), self.num_classes) if self.multi_label else len(tokens))
        else:
            targets = loader.find_entry(batch, loader.TARGETS, "labels") if isinstance(batch, Mapping) else batch[1]
        if self.info.multi_label:
            loader.check_several_labels(targets, exact=not self.training)
        else:
            loader.check_class_numbers(targets, self.num_classes)
        lengths = mask.sum(dim=1)
        inputs = DocumentInputs(
            tokens=tokens[mask][None].long(),
            cu_seqlens=functional.pad(lengths.cumsum(0), (1, 0)).int(),
            max_seqlen=tokens.shape[1],
            lengths=lengths,
            whole_lengths=lengths,
            numbers=torch.arange(len(tokens), device=tokens.device),
            units=len(tokens),
            token_count=int(lengths.sum()),
        )
        return inputs, targets.float() if self.info.multi_label else targets.long()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """The probabilities `[N, C]` of the documents of a batch, which needs no labels."""
        inputs, _ = self.read_batch(batch)
        return self.probabilities(self(inputs)[inputs.numbers >= 0])

    def forward(self, inputs: DocumentInputs) -> Tensor:
        """Logits `[N, C]` of the N places of a batch; undefined at empty places."""
        return self._read(inputs.tokens, inputs.packing)

    def _read(self, tokens: Tensor, packing: Packing) -> Tensor:
        if self.info.segment and isinstance(self.backbone, TextClassifier):
            options = {"segment": self.info.segment, "gradient_segments": self.info.gradient_segments}
            return read_in_segments(self.backbone, tokens, cu_seqlens=packing, **options)
        return self.backbone(tokens, packing)

    def training_step(self, batch: DocumentBatch, batch_idx: int) -> Tensor:
        self.seed_batch(batch_idx)
        inputs, targets = self.read_batch(batch)
        packing = inputs.packing
        self._plugin_mixers.check(self.backbone, packing)
        logits = self._train_read(inputs.tokens, packing)
        losses = self._losses(logits.float(), targets, self.label_smoothing, self._class_weights)
        return self.mean_of_update(torch.where(inputs.numbers >= 0, losses, 0.0).sum())

    def count_targets(self, batch: DocumentBatch) -> int:
        return batch[0].units

    def evaluate_batch(self, batch: DocumentBatch, metrics: Any, stage: str) -> None:
        """Update the metrics of a stage; a process's part of a distributed batch may be empty."""
        inputs, targets = batch
        real = inputs.numbers >= 0
        self._plugin_mixers.check(self.backbone, inputs.packing)
        logits, targets = self(inputs)[real].float(), targets[real]
        if len(targets):
            metrics["loss"].update(self._losses(logits, targets).mean(), weight=len(targets))
        self.measure(self.rankable(logits), targets.long(), metrics, stage)
        if stage == "test":
            self._by_length.update(self.decide(logits) == targets, inputs.whole_lengths[real])

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        accuracies, self.documents_by_length, self.length_quartiles = self._by_length.compute()
        self._by_length.reset()
        # All processes have the same values; without sync_dist Lightning warns.
        self.log_dict({f"test/accuracy_{name}": value for name, value in accuracies.items()}, sync_dist=True)

    def count_flops(self, batch: DocumentBatch) -> int:
        """The operations of a training step: three forward passes over the documents, without recomputation."""
        flops: Any = cache(self.backbone.flops)  # type: ignore[arg-type]
        return 3 * sum(flops(length) for length in batch[0].lengths.tolist() if length)

    def _losses(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
        """The loss of each document, `[N]`."""
        if self.info.multi_label:
            softened = targets * (1 - smoothing) + smoothing / 2
            losses = functional.binary_cross_entropy_with_logits(logits, softened, reduction="none")
            return (losses if weights is None else losses * torch.where(targets > 0, weights, 1.0)).mean(dim=1)
        losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        return losses if weights is None else losses * weights[targets.clamp(min=0)]


class LinearTask(DocumentTask):
    """Fits the linear model to all training documents at the beginning of a run, the same in each process.

    One batch with a learning rate of 0 follows; then the Trainer validates, saves and tests. `keys` are the model's.
    """

    has_gradients = False
    epochs_trained = 1  # type: ignore[assignment]

    def __init__(self, backbone: LinearTextClassifier, *, keys: LinearModelKeys | None = None, **options: Any) -> None:
        super().__init__(backbone, **options)
        self.keys = keys

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != TrainerFn.FITTING:
            return
        assert self.keys is not None, "without keys, this task only measures"
        trainer: Any = self.trainer
        data: Any = trainer.datamodule
        train, validation = (read_documents(data.splits[stage]) for stage in ("train", "val"))
        self.backbone = fit_linear(train, validation, data.info, self.keys)
        trainer.limit_train_batches = 1
        trainer.fit_loop.max_epochs = trainer.check_val_every_n_epoch = self.last_update = 1
        trainer.val_check_interval = 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The number of n-grams decides the shape of the weights.
        text, device = self.backbone.text, self.device
        self.backbone = build(checkpoint[CHECKPOINT_CONFIG]).to(device)
        self.backbone.text = text
        super().on_load_checkpoint(checkpoint)
