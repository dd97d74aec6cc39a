"""The configuration keys of document classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from longseq.arguments import Inert
from longseq.tasks.data.labels import ClassWeights, Sampling, check_balance, check_label_keys
from longseq.tasks.document.truncation import Truncation
from longseq.tasks.training.keys import ClassifierGroup, TaskKeys
from longseq.tasks.training.options import Length, Range
from longseq.tasks.training.token_keys import BodyKeys

Fraction = Annotated[float, Range(above=0, below=1)]


@dataclass(frozen=True, kw_only=True)
class DocumentModelKeys(BodyKeys):
    """The keys of `model`, explained in `longseq.backbones.classifier.TextClassifier` and `TokenBackbone`."""

    inert_with: ClassVar[Inert] = {
        **BodyKeys.inert_with,
        "ngram_buckets": ({"hashed_ngrams": (1,)},),
    }

    name: Literal["document", "document_pair"]
    pooling: Literal["mean", "max", "last", "first", "attention"] | None = None
    head_dropout: Annotated[float | None, Range(0, below=1)] = None
    hashed_ngrams: Annotated[int | None, Range(1, 16)] = None
    ngram_buckets: Annotated[int | None, Range(1, 2**31 - 1)] = None
    share_directions: Literal["projections", "all", "none"] | None = None
    merge: Literal["sum", "mean"] | None = None
    separator: Annotated[int | None, Range(0)] = None  # of pairs

    def __post_init__(self) -> None:
        if self.separator is not None and self.name != "document_pair":
            raise ValueError(
                f"model.separator={self.separator} stands between the two documents of a pair: take model=document_pair"
            )


@dataclass(frozen=True, kw_only=True)
class DocumentDataKeys:
    """The keys of `data`, explained in `longseq.tasks.document.data.DocumentData`."""

    name: str
    source: str
    root: str | None = None
    train: str | None = None
    validation: Fraction | str | None = None
    test: Fraction | str | None = None
    text_column: str | None = None
    label_column: str | Annotated[list[str], Length(1)] | None = None
    label_delimiter: str | None = None
    multi_label: bool = False
    on_bad_line: Literal["skip", "stop"] = "skip"
    duplicates: Literal["report", "drop"] = "report"
    options: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    separator: str | None = None
    max_length: Annotated[int | None, Range(2)] = None
    truncation: Truncation = "none"
    random_crops: bool = False
    segment: Annotated[int | None, Range(1)] = None
    gradient_segments: Annotated[int | None, Range(1)] = None
    class_weights: ClassWeights = "none"
    sampling: Sampling = None
    packing: Literal["packed", "padded"] = "packed"
    cache: str | None = None
    check: bool = True
    eval_batch_size: Annotated[int | None, Range(1)] = None
    num_workers: Annotated[int, Range(0)] = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if (self.max_length is None) != (self.truncation == "none"):
            raise ValueError(
                f"data.truncation={self.truncation} needs the tokens that are read of a document: give "
                "data.max_length=NUMBER"
                if self.max_length is None
                else f"data.max_length={self.max_length} cuts longer documents: give data.truncation=head, tail, "
                "head_tail or middle"
            )
        if self.random_crops and self.max_length is None:
            raise ValueError("data.random_crops=true reads windows of a document: give data.max_length=NUMBER")
        if self.gradient_segments is not None and self.segment is None:
            raise ValueError(
                f"data.gradient_segments={self.gradient_segments} counts segments: give their length too, "
                "data.segment=TOKENS"
            )
        fractions = [value for value in (self.validation, self.test) if isinstance(value, float)]
        if sum(fractions) >= 1:
            raise ValueError(
                f"data.validation={self.validation} and data.test={self.test} leave nothing to train on: give less "
                "than 1"
            )
        check_balance(self.sampling, self.class_weights)
        if self.sampling is not None and self.packing == "padded":
            raise ValueError(
                "data.sampling=balanced fills packed rows, and data.packing=padded sorts documents by their length: "
                "give data.packing=packed, or data.class_weights=balanced in place of data.sampling"
            )
        text = ("text_column", self.text_column or "text")
        check_label_keys(self.multi_label, self.label_column, self.label_delimiter, text)


@dataclass(frozen=True, kw_only=True)
class LossKeys:
    """The keys of `recipe.loss`, explained in `longseq.tasks.document.module.DocumentTask`."""

    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0


@dataclass(frozen=True)
class DocumentKeys(TaskKeys):
    """The keys of document classifiers."""

    data: type = DocumentDataKeys
    group: type = ClassifierGroup
    loss: type | None = LossKeys

    def check(self, config: Mapping[str, Any]) -> None:
        if config["recipe"].get("model"):
            raise ValueError("recipe.model is read by no part of task=document: leave it out with ~recipe.model")
        # The keys themselves need none of these, which take seconds to import.
        from longseq.tasks.document.metrics import TABLES
        from longseq.tasks.training.classification import check_metrics

        group = config["task"]
        if isinstance(group.get("metrics") or {}, Mapping):
            several = bool(config["data"].get("multi_label"))
            check_metrics(group["metric"], group.get("metrics") or {}, multi_label=several, tables=TABLES)
