"""The models of this task: classifiers on the body of a token model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.document_pairs import PairClassifier
from longseq.backbones.linear_text import LinearTextClassifier
from longseq.backbones.segments import check_segments
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.ngrams import HashedNgrams
from longseq.tasks.document import linear
from longseq.tasks.document.info import DocumentInfo
from longseq.tasks.training.checkpoint import Loaded
from longseq.tasks.training.model import TaskModel, note, note_new_head, outlined
from longseq.tasks.training.token_model import build_seeded, check_alike, check_tokenizer, have_one_tokenizer

# The classifiers on the body of a token model, as `config.model` names them.
MODELS: Mapping[str, type[TextClassifier]] = {"document": TextClassifier, "document_pair": PairClassifier}


class DocumentModel(TaskModel):
    """Builds the classifier that `config.model` describes, for the classes and the vocabulary of the documents."""

    starts_from = ("lm",)

    def build(self, config: Mapping[str, Any], info: DocumentInfo) -> nn.Module:
        """The model of a configuration. Options that are null there take the model's own defaults.

        The linear model is empty until the run fits it.
        """
        if config["model"]["name"] == linear.MODEL:
            return LinearTextClassifier(num_classes=info.num_classes, ngrams=config["model"]["ngrams"])
        model = build_classifier(config, info.num_classes, info.vocab_size, info.window)
        _check_positions(model, info)
        if config["data"].get("segment") is not None:
            check_segments(model, config["data"].get("gradient_segments"), config["data"]["segment"])
        return model

    def outline(self, config: Mapping[str, Any], info: DocumentInfo) -> nn.Module:
        return outlined(config, lambda: self.build(config, info))

    def start_from(self, model: Any, loaded: Loaded, info: DocumentInfo) -> None:
        """Copy the body of a language model or of another classifier (see `TextClassifier.load_body`).

        Of a classifier of the same kind and classes the head is copied, too, and the pooling and the n-grams if they
        are the same. Notes tell what begins new, and another pooling.
        """
        trained: Any = loaded.backbone
        if isinstance(model, LinearTextClassifier) or isinstance(trained, LinearTextClassifier):
            raise ValueError(
                f"init={loaded.path}: a linear model is fitted to the training documents; it starts from no other "
                "model, and no other from it: leave init out"
            )
        check_tokenizer(loaded, info.tokenizer)
        is_classifier = isinstance(trained, TextClassifier)
        body: TokenBackbone = trained.body if is_classifier else trained
        # `load_body` checks these itself; their messages need no other key than their names.
        free = ("vocab_size", "tie_embeddings", "direction", "share_directions", "merge")
        check_alike(model.body, body, ignored=free)
        try:
            model.load_body(body)
        except ValueError as error:
            raise ValueError(f"init={loaded.path}: {error}") from error
        theirs = loaded.data.get("class_names") or []
        if not is_classifier:
            note(model, "the head is new: the weights are of a language model")
        elif type(trained) is not type(model):
            note(model, f"the head is new: it reads {_read_by(model)}, and that of the weights {_read_by(trained)}")
        elif theirs != info.class_names:
            note_new_head(model, info.class_names, [str(name) for name in theirs])
        else:
            model.head.load_state_dict(trained.head.state_dict())
        if is_classifier:
            _take_pooling(model, trained)
        _take_ngrams(model, trained.ngrams if is_classifier else None)

    def check_reads(self, model: Any, trained: DocumentInfo, found: DocumentInfo) -> None:
        """Raise ValueError if a model that was trained on documents of `trained` cannot read those of `found`."""
        own, its = found.tokenizer, trained.tokenizer
        if found.vocab_size != trained.vocab_size or not have_one_tokenizer(own, its):
            raise ValueError("the data has another tokenizer than the model was trained with")
        if not isinstance(model, LinearTextClassifier):
            _check_positions(model, found)


def build_classifier(config: Mapping[str, Any], num_classes: int, vocab_size: int, longest: int) -> TextClassifier:
    """The classifier of a configuration; `longest` is the length of learned positions where `max_length` is null.

    ValueError, in one line, for another model and for options that the model does not have.
    """
    name = config["model"]["name"]
    if name not in MODELS:
        raise ValueError(
            f"task=document trains classifiers: take model={', '.join(MODELS)} or {linear.MODEL} in place of {name}"
        )
    return build_seeded(MODELS[name], config, longest, num_classes=num_classes, vocab_size=vocab_size)


def _read_by(model: TextClassifier) -> str:
    return "pairs of documents" if isinstance(model, PairClassifier) else "single documents"


def _take_pooling(model: TextClassifier, trained: TextClassifier) -> None:
    if trained.pooling.kind == model.pooling.kind:
        model.pooling.load_state_dict(trained.pooling.state_dict())
    else:
        note(model, f"the features of tokens are pooled by {trained.pooling.kind}, and now by {model.pooling.kind}")


def _take_ngrams(model: TextClassifier, theirs: HashedNgrams | None) -> None:
    own = model.ngrams
    if own is not None and theirs is not None and _size(own) == _size(theirs):
        own.load_state_dict(theirs.state_dict())
    elif own is not None:
        note(model, f"the n-grams are new: the weights have {'none' if theirs is None else _size(theirs)}")
    elif theirs is not None:
        note(model, f"the n-grams of the weights are left out: give {_size(theirs)} to take them")


def _size(ngrams: HashedNgrams) -> str:
    return f"model.hashed_ngrams={ngrams.longest} model.ngram_buckets={ngrams.buckets}"


def _check_positions(model: Any, info: DocumentInfo) -> None:
    most = model.body.max_length
    if most is not None and info.window > most:
        raise ValueError(
            f"the model has learned positions for {most} tokens, and the longest document {info.window}: cut documents "
            f"by data.max_length={most} data.truncation=head"
        )
