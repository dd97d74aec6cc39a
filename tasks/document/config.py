"""The keys of document classifiers, what `data=documents` chooses by its documents, and what models record of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from longseq.tasks.config import ClassifierGroup, Count, Keys, Share, TaskKeys, key
from longseq.tasks.data.info import Info
from longseq.tasks.data.labels import SEVERAL_LABELS, ClassWeights, Sampling
from longseq.tasks.text.tokenizer import Tokenizer, tokenizer_from_dict
from longseq.tasks.training.automatic import AUTO, settle, value_of
from longseq.tasks.training.configuration import BodyKeys

Fraction = Annotated[float, Field(gt=0, lt=1)]


class DocumentModelKeys(BodyKeys):
    """The keys of `model`, explained in `longseq.backbones.classifier.TextClassifier` and `TokenBackbone`."""

    name: Literal["document", "document_pair"] = key("document", "the kind of model")
    pooling: Literal["mean", "max", "last", "first", "attention"] | None = key(None, "over the tokens of a document")
    head_dropout: Share | None = key(None, "of the pooled features")
    hashed_ngrams: Annotated[int, Field(ge=1, le=16)] | None = key(
        None, "3: adds embeddings of the pairs and triples of tokens that end at a token to its own"
    )
    ngram_buckets: Annotated[int, Field(ge=1, lt=2**31)] | None = key(
        None, "the embeddings that the n-grams of one length share by a hash"
    )
    share_directions: Literal["projections", "none"] | None = key(None, "what the two readings of a layer share")
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
        None, "null: label; for several labels also a list of columns of 1 or 0"
    )
    label_delimiter: str | None = key(None, "separates several labels in a cell of text")
    multi_label: bool = key(False, "true: a document has any number of labels")
    duplicates: Literal["report", "drop"] = key("report", "documents in two splits: report, or drop them from training")
    options: dict[str, Any] = key({}, "of a registered source")
    tokenizer: str | None = key(
        None, "bytes, a tokenizer.json or its folder, train:16384, init; null: init's, else bytes"
    )
    separator: str | None = key(None, "the token that begins a document; null: the tokenizer's end-of-text token")
    max_length: Annotated[int, Field(ge=2)] | None = key(None, "the most tokens that are read of a document")
    truncation: Literal["none", "head", "tail", "head_tail", "middle"] = key(
        "none", "which tokens of a longer document: head, tail, head_tail, middle; none: all"
    )
    random_crops: bool = key(
        False, "training reads max_length tokens from a random place, evaluation what truncation leaves"
    )
    segment: Count | None = key(None, "the most tokens in memory: longer documents are read in segments; null: whole")
    gradient_segments: Count | None = key(None, "gradients go through so many last segments; null: all")
    class_weights: ClassWeights = key("none", "balanced, a list, or {NAME: NUMBER}: weights of classes in the loss")
    sampling: Sampling = key(None, "balanced: an epoch draws each class equally often")
    cache: str | None = key(None, "the folder of prepared text; null: longseq/text in XDG_CACHE_HOME")
    check: bool = key(True, "compare the checksums of the cache's files")
    eval_batch_size: Count | None = key(None, "tokens at a time; null: the training batch, or the longest document")
    num_workers: int = key(0, "processes that make batches", ge=0)
    pin_memory: bool = key(False, "copy batches to a GPU from pinned memory")

    @model_validator(mode="after")
    def _agree(self) -> DocumentDataKeys:
        if self.max_length is None and self.truncation != "none":
            raise ValueError(f"truncation={self.truncation} needs max_length=NUMBER")
        if self.max_length is not None and self.truncation == "none" and not self.random_crops:
            raise ValueError(f"max_length={self.max_length} needs truncation=head, tail, head_tail or middle")
        if self.random_crops and self.max_length is None:
            raise ValueError("random_crops=true needs max_length=NUMBER")
        if self.gradient_segments is not None and self.segment is None:
            raise ValueError("gradient_segments needs segment=TOKENS")
        if sum(value for value in (self.validation, self.test) if isinstance(value, float)) >= 1:
            raise ValueError("validation and test must be less than 1 together")
        if not self.multi_label and (isinstance(self.label_column, list) or self.label_delimiter is not None):
            raise ValueError(SEVERAL_LABELS)
        return self


class LossKeys(Keys):
    """The keys of `recipe.loss`, explained in `longseq.tasks.document.module.DocumentTask`."""

    label_smoothing: Share = key(0.0, "the part of the target's probability that is spread over all classes")


class LinearModelKeys(Keys):
    """The keys of `model=linear`: scikit-learn's logistic regression on TF-IDF; keys of model=document are ignored.

    `ngrams` and `min_documents` are the best on the validation of data=libraries. Punctuation marks count as words.
    """

    model_config = ConfigDict(extra="ignore")

    name: Literal["linear"] = key("linear", "the kind of model")
    label: str = key("TF-IDF", "the name in tables")
    ngrams: Count = key(2, "the most words of an n-gram")
    min_documents: Count = key(2, "n-grams of fewer training documents are left out")
    inverse_regularization: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] = key(
        [1.0, 10.0, 100.0], "values of scikit-learn's C; the one with the lowest validation loss is chosen"
    )


# (training documents below this number, the most tokens of a document that an epoch reads, buckets of n-grams)
ROWS = ((5_000, 1024, 32_768), (20_000, 512, 65_536), (math.inf, 512, 131_072))
WHOLE = 4096  # documents of at most so many tokens are read whole; of longer ones training reads windows
SEGMENT = 16_384  # the tokens in memory when evaluation reads such a document
# What training reads in all, and the epochs that this may be: less than ten minutes on two cores with model=documents.
TOKENS, FEWEST, MOST = 16_000_000, 2, 20
BATCH = 8192


@dataclass(frozen=True)
class DocumentKeys(TaskKeys):
    """The keys of document classifiers."""

    data: type[Keys] = DocumentDataKeys
    model: Any = Annotated[DocumentModelKeys | LinearModelKeys, Field(discriminator="name")]
    group: type[ClassifierGroup] = ClassifierGroup
    loss: type[Keys] | None = LossKeys

    def check(self, config: Mapping[str, Any]) -> None:
        # Imported here, since these take seconds and the keys need none of them.
        from longseq.tasks.document.report import TABLES
        from longseq.tasks.training.metrics import check_metrics

        group, several = config["task"], bool(config["data"]["multi_label"])
        check_metrics(group["metric"], group["metrics"], multi_label=several, tables=TABLES)

    def choose(self, config: Mapping[str, Any], info: DocumentInfo | None, parts: int) -> dict[str, Any]:
        """As `TaskKeys.choose`, for the keys of data=documents and of its recipe and model.

        Before the data is open, 1,000 short documents are assumed.
        """
        trained, recipe = config.get("init") is not None, config["recipe"]
        documents, longest = (1_000, 1) if info is None else (info.sizes["train"] or 0, info.window)
        tokens = 300_000 if info is None else info.tokens or 0
        window, buckets = next(row[1:] for row in ROWS if documents < row[0])
        given, batch, epochs = config["data"].get("max_length"), recipe["batch_size"], recipe.get("epochs")
        whole = min(WHOLE, batch // parts) if isinstance(batch, int) else WHOLE  # a device's batch holds each document
        most = min(window, whole) if given == AUTO and longest > whole else None if given == AUTO else given
        crops = value_of(config, "data.random_crops", given == AUTO and most is not None)
        held = longest if not isinstance(most, int) else min(most, longest)
        read = min(tokens, documents * held)
        fitting = max(FEWEST, min(MOST, round(TOKENS / max(1, read))))
        in_epochs = not (recipe.get("updates") or recipe.get("tokens"))
        validations = (epochs if isinstance(epochs, int) else fitting) // 5 if in_epochs else 1
        values: dict[str, Any] = {
            "data.tokenizer": None if trained else "train:8192",
            "data.max_length": most,
            "data.truncation": "none" if most is None else "middle",
            "data.random_crops": crops,
            "data.segment": None,
            "model.direction": "bidirectional" if trained else "forward",
            "model.hashed_ngrams": 1 if trained else 3,
            "model.ngram_buckets": buckets,
            "model.mlp": "swiglu" if trained else "none",
            "model.dropout": 0.0 if trained else 0.3,
            "model.head_dropout": 0.0 if trained else 0.3,
            "recipe.epochs": fitting,
            "recipe.validate_every_epochs": max(1, validations),
            "recipe.batch_size": math.ceil(max(min(BATCH, read // 32), held * parts) / parts) * parts,
            "recipe.learning_rate": 8e-3,
        }
        if crops and info is not None and _carries_state(settle(config, values), info):
            values |= {"data.truncation": "none", "data.segment": SEGMENT}
        return values


def _carries_state(config: Mapping[str, Any], info: DocumentInfo) -> bool:
    """True if the model of a configuration can read a document of any length: in segments, or the linear one."""
    import torch

    from longseq.backbones.segments import find_obstacle
    from longseq.tasks.document.model import LINEAR, DocumentModel

    with torch.device("meta"):
        obstacle = find_obstacle(DocumentModel().build(config, info))
    return config["model"]["name"] == LINEAR or (obstacle is None and config["trainer"].get("strategy") != "fsdp")


@dataclass(frozen=True)
class DocumentInfo(Info):
    """The facts about documents that models, checkpoints and exported files need.

    class_names: in the order of a model's outputs. With `multi_label` a document has any number of them.
    separator: the token that begins each document. None for data that consists of tokens.
    tokenizer: from `Tokenizer.to_dict`. None for data that consists of tokens.
    window: the tokens of the longest training document, after truncation.
    tokens: the tokens of all training documents, before truncation.
    max_length, truncation: see `longseq.tasks.document.batch.truncate`.
    segment, gradient_segments: see `longseq.backbones.segments`; None for whole documents, and for all segments.
    text_column: None for `text`.
    class_counts: the training documents of each class.
    class_weights: the weight of each class, or of each label that a document has, in the loss. None: all are 1.
    thresholds: see `longseq.tasks.training.metrics.decide`. None: one half, or the most probable class.
    source, source_plugin: `data.source` of the training, and the plug-in that registers it; None if unknown.
    preparation: the name of the source's function `prepare`, None without one.
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
    tokens: int | None = None

    _changed = "other texts or labels"
    _meaning = ("class_names", "multi_label", "tokenizer", "separator")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer. ValueError for data that consists of tokens, or if its tokens are not the model's."""
        if self.tokenizer is None:
            raise ValueError("the model was trained on tokens that stand for no text")
        found = tokenizer_from_dict(self.tokenizer)
        if found.vocab_size > self.vocab_size or found.separator != self.separator:
            raise ValueError("the saved tokenizer is not the one of the training")
        return found

    def describe(self) -> str:
        """The documents in a few words."""
        labels = "labels" if self.multi_label else "classes"
        return f"{len(self.class_names)} {labels}, {self.vocab_size} tokens, documents of at most {self.window}"
