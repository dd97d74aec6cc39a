"""The document classifiers of longseq as models of transformers.

    import longseq.tools.hugging_face.sequence_classification
    from transformers import pipeline

    classify = pipeline("text-classification", FOLDER)         # what longseq.save_pretrained wrote
    classify(["A document.", "Another one."], batch_size=2)    # [{"label": ..., "score": ...}, ...]

Importing this module enters the classes in the tables of transformers. The folders of both libraries are the same: what
one saves the other loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers import initialization as initial
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from longseq.backbones.classifier import MODEL_TYPE, TextClassifier
from longseq.tools.hugging_face.backbone import BackboneConfig, BackboneModel, check_options
from longseq.tools.hugging_face.cache import rows_with_padding


class LongseqDocumentConfig(BackboneConfig):
    """The config.json of a `TextClassifier` (see `longseq.models`), as transformers reads and writes it.

        LongseqDocumentConfig(model_args={"vocab_size": 257, "d_model": 512, "mixer": "deltanet"}, num_labels=20)

    `model_args` are arguments of `TextClassifier`; those that are left out have its defaults. `num_labels`, or
    `id2label`, decides `num_classes` where they differ.
    """

    model_type = MODEL_TYPE
    backbone = TextClassifier

    kind: str = "document"

    def __post_init__(self, **others: Any) -> None:
        if self.id2label is None and "num_classes" in (self.model_args or {}):
            others.setdefault("num_labels", self._arguments["num_classes"])
        super().__post_init__(**others)

    def _complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "num_classes": self.num_labels}


class LongseqForSequenceClassification(BackboneModel):
    """A `TextClassifier`, `self.model`, with the interface of transformers.

    Padding on either side, where `attention_mask` is 0, does not change the scores. The configuration's `problem_type`
    decides the loss: the cross-entropy of one class, or the mean binary cross-entropy of any number of labels. Loading
    with another number of labels and `ignore_mismatched_sizes=True` gives a new head.
    """

    config_class = LongseqDocumentConfig
    config: LongseqDocumentConfig
    accepts_loss_kwargs = False  # the loss is the mean over the documents of a batch; the Trainer accumulates it
    _no_split_modules: ClassVar[list[str]] = ["TextClassifier"]  # a device holds the whole model

    @property
    def body(self) -> Any:
        return self.model.body

    @property
    def score(self) -> nn.Module:
        """The head, by a name with which peft finds it: peft trains and saves the head of a classifier whole."""
        return self.model.head

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "score":
            self.model.head = value
        else:
            super().__setattr__(name, value)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module. To peft, whose models ask for duplicates and call this one `base_model`, the head is also
        `score`, unless it has an adapter of its own.
        """
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if not remove_duplicate and prefix.startswith("base_model") and not hasattr(self.score, "base_layer"):
            yield f"{prefix}.score", self.score

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Score the classes of each document.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 0 at padding.
            labels: `[B]` numbers of classes, or `[B, num_labels]` float zeros and ones for any number of labels.
            kwargs: what other models of transformers take; each must be None or False.
        """
        check_options(kwargs)
        logits = self.model(input_ids, mask=rows_with_padding(attention_mask, input_ids.shape[1]))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _init_weights(self, module: nn.Module) -> None:
        if self._is_built and module is self.model.head:  # of another number of labels than the file's
            initial.trunc_normal_(module.weight, std=0.02)
            initial.zeros_(module.bias)
            return
        super()._init_weights(module)


AutoConfig.register(MODEL_TYPE, LongseqDocumentConfig)
AutoModelForSequenceClassification.register(LongseqDocumentConfig, LongseqForSequenceClassification)
