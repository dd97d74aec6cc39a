"""The properties of labelled documents that a model, its checkpoints and exported files need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longseq.tasks.data.info import Info
from longseq.tasks.text.tokenizer import Tokenizer, tokenizer_from_dict


@dataclass(frozen=True)
class DocumentInfo(Info):
    """The classes of documents, and how their text becomes tokens.

    `class_names` are in the order of a model's outputs; with `multi_label` a document has any number of them.
    `vocab_size` is the number of tokens. `separator` is the token with which each document begins, and `tokenizer` what
    `Tokenizer.to_dict` returns; both are None for data that consists of tokens. `window` is the length in tokens of the
    longest document that training reads; `max_length` and `truncation` state how longer ones are cut (see
    `longseq.tasks.document.batch`), where `max_length` may be None. `segment` is the number of tokens that are in
    memory at once, None for whole documents, and `gradient_segments` the number of segments that gradients go through,
    None for all (see `longseq.backbones.segments`). `text_column` is the column of the text, None for `text`.
    `class_counts` has the training documents of each class, and `class_weights` the weight of each class in the loss
    (with `multi_label` that of a document's own labels), None if all are 1. `sizes` has the documents of each split.
    `thresholds` are those of `longseq.tasks.training.metrics.decide`: the probabilities from which a label is given,
    or the second one of two classes; None for one half, or for the most probable class. `source` is `data.source` of
    the training, whose preparation of a text `longseq predict` repeats; None where it is not known. `source_plugin` is
    the plug-in that registers it, and `preparation` names what it does to a text
    (`longseq.tasks.document.sources.describe_preparation`); None where there is none.
    """

    class_names: list[str]
    multi_label: bool
    vocab_size: int
    separator: int | None
    tokenizer: dict[str, Any] | None
    window: int
    max_length: int | None = None
    truncation: str = "none"
    segment: int | None = None
    gradient_segments: int | None = None
    text_column: str | None = None
    class_counts: list[int] = field(default_factory=list)
    class_weights: list[float] | None = None
    thresholds: list[float] | None = None
    source: str | None = None
    source_plugin: str | None = None
    preparation: str | None = None

    _changed = "other texts or labels"
    _meaning = ("class_names", "multi_label", "tokenizer", "separator")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def make_tokenizer(self) -> Tokenizer:
        """ValueError for data that consists of tokens, and for a tokenizer of other tokens than the model's."""
        if self.tokenizer is None:
            raise ValueError("the model was trained on tokens that stand for no text")
        found = tokenizer_from_dict(self.tokenizer)
        if found.vocab_size > self.vocab_size or found.separator != self.separator:
            raise ValueError("the tokenizer beside the model is not that of its training")
        return found

    def describe(self) -> str:
        """The documents in a few words."""
        labels = "labels" if self.multi_label else "classes"
        return f"{len(self.class_names)} {labels}, {self.vocab_size} tokens, documents of at most {self.window}"
