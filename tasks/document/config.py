"""The configuration keys of document classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from longseq.tasks.config import ClassifierGroup, Count, Keys, Share, TaskKeys, key
from longseq.tasks.data.labels import ClassWeights, Sampling, check_label_keys
from longseq.tasks.training.configuration import BodyKeys

Fraction = Annotated[float, Field(gt=0, lt=1)]


class DocumentModelKeys(BodyKeys):
    """The keys of `model`, explained in `longseq.backbones.classifier.TextClassifier` and `TokenBackbone`."""

    name: Literal["document", "document_pair"] = key("document", "the kind of model")
    pooling: Literal["mean", "max", "last", "first", "attention"] | None = key(None, "over the tokens of a document")
    head_dropout: Share | None = key(None, "of the pooled features")
    hashed_ngrams: Annotated[int, Field(ge=1, le=16)] | None = key(
        None, "3: embeddings of the pairs and triples of tokens that end at a token are added to its own"
    )
    ngram_buckets: Annotated[int, Field(ge=1, lt=2**31)] | None = key(
        None, "the embeddings that n-grams of one length share by a hash"
    )
    share_directions: Literal["projections", "all", "none"] | None = key(None, "what both readings of a layer share")
    merge: Literal["sum", "mean"] | None = key(None, "of the two readings")
    separator: Annotated[int, Field(ge=0)] | None = key(None, "of pairs: the token between the two documents")


class DocumentDataKeys(Keys):
    """The keys of `data`, explained in `longseq.tasks.document.data.DocumentData`."""

    name: str = key(..., "the name in tables")
    source: str = key(..., "what the documents are")
    root: str | None = key(
        None, "jsonl, csv, tsv, parquet, a saved set, a folder of these, or a folder of class folders"
    )
    train: str | None = key(None, "the training documents below root; null: root itself")
    validation: Fraction | str | None = key(None, "a file below root, or the share of the training documents")
    test: Fraction | str | None = key(None, "as validation")
    text_column: str | None = key(None, "null: text")
    label_column: str | Annotated[list[str], Field(min_length=1)] | None = key(
        None, "null: label; or for several labels a list of columns that hold 1 or 0"
    )
    label_delimiter: str | None = key(None, "what stands between several labels in a cell of text")
    multi_label: bool = key(False, "true: a document has any number of labels")
    on_bad_line: Literal["skip", "stop"] = key("skip", "what happens where a document cannot be read")
    duplicates: Literal["report", "drop"] = key("report", "documents in two splits: report, or drop them from training")
    options: dict[str, Any] = key({}, "of a source that a program registers")
    tokenizer: str | None = key(
        None, "bytes, a tokenizer.json or its folder, train:16384, init; null: init's, else bytes"
    )
    separator: str | None = key(None, "the token that begins a document; null: the tokenizer's end-of-text token")
    max_length: Annotated[int, Field(ge=2)] | None = key(None, "the tokens that are read of a longer document")
    truncation: Literal["none", "head", "tail", "head_tail", "middle"] = key(
        "none", "which ones: head, tail, head_tail, middle; none: whole documents"
    )
    random_crops: bool = key(False, "in training the window of max_length tokens begins anywhere")
    segment: Count | None = key(None, "tokens in memory at once: longer documents are read in segments; null: whole")
    gradient_segments: Count | None = key(None, "of a document, the last segments that gradients go through; null: all")
    class_weights: ClassWeights = key("none", "balanced, a list, or {NAME: NUMBER}: weights of classes in the loss")
    sampling: Sampling = key(None, "balanced: an epoch draws each class equally often")
    packing: Literal["packed", "padded"] = key(
        "packed", "packed: documents end to end; padded: rows of similar lengths"
    )
    cache: str | None = key(None, "the folder of prepared text; null: longseq/text in XDG_CACHE_HOME")
    check: bool = key(True, "compare the checksums of the cache's files")
    eval_batch_size: Count | None = key(None, "tokens at a time; null: the training batch, or the longest document")
    num_workers: int = key(0, "processes that make batches", ge=0)
    pin_memory: bool = key(False, "copy batches to a GPU from pinned memory")

    @model_validator(mode="after")
    def _agree(self) -> DocumentDataKeys:
        if self.max_length is None and self.truncation != "none":
            raise ValueError(f"truncation={self.truncation} needs max_length=NUMBER")
        if self.max_length is not None and self.truncation == "none":
            raise ValueError(f"max_length={self.max_length} needs truncation=head, tail, head_tail or middle")
        if self.random_crops and self.max_length is None:
            raise ValueError("random_crops=true needs max_length=NUMBER")
        if self.gradient_segments is not None and self.segment is None:
            raise ValueError("gradient_segments counts segments: give segment=TOKENS too")
        if sum(value for value in (self.validation, self.test) if isinstance(value, float)) >= 1:
            raise ValueError("validation and test leave nothing to train on: give less than 1")
        if self.sampling is not None and self.packing == "padded":
            raise ValueError("sampling=balanced needs packing=packed")
        text = ("text_column", self.text_column or "text")
        check_label_keys(self.multi_label, self.label_column, self.label_delimiter, text)
        return self


class LossKeys(Keys):
    """The keys of `recipe.loss`, explained in `longseq.tasks.document.module.DocumentTask`."""

    label_smoothing: Share = key(0.0, "the part of a target's probability that all classes share")


class LinearModelKeys(Keys):
    """The keys of `model=linear`, explained in `longseq.tasks.document.linear`; those of model=document have no effect.

    The defaults were chosen on the validation documents of data=libraries: single characters between words are words of
    their own, pairs of words beat single ones and triples, and C=10 beats C=1.
    """

    model_config = ConfigDict(extra="ignore")

    name: Literal["linear"] = key("linear", "the kind of model")
    label: str = key("TF-IDF", "the name in tables")
    ngrams: Count = key(2, "the most words of an n-gram")
    min_documents: Count = key(2, "the vocabulary has n-grams of at least so many training documents")
    inverse_regularization: Annotated[float, Field(gt=0)] = key(10.0, "scikit-learn's C")


@dataclass(frozen=True)
class DocumentKeys(TaskKeys):
    """The keys of document classifiers."""

    data: type[Keys] = DocumentDataKeys
    model: Any = Annotated[DocumentModelKeys | LinearModelKeys, Field(discriminator="name")]
    group: type[ClassifierGroup] = ClassifierGroup
    loss: type[Keys] | None = LossKeys

    def check(self, config: Mapping[str, Any]) -> None:
        # The keys themselves need none of these, which take seconds to import.
        from longseq.tasks.document.metrics import TABLES
        from longseq.tasks.training.metrics import check_metrics

        group, several = config["task"], bool(config["data"]["multi_label"])
        check_metrics(group["metric"], group["metrics"], multi_label=several, tables=TABLES)
