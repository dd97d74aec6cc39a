"""The models of this task: classifiers on the body of a token model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.document_pairs import PairClassifier
from longseq.backbones.linear_text import LinearTextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.document import linear
from longseq.tasks.document.info import DocumentInfo
from longseq.tasks.training.checkpoint import Loaded
from longseq.tasks.training.model import TaskModel, note
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
        return build_classifier(config, info.num_classes, info.vocab_size, info.window)

    def start_from(self, model: Any, loaded: Loaded, info: Any) -> None:
        """Copy the body of a language model or of another classifier (see `TextClassifier.load_body`).

        Of a classifier of the same kind and classes the head is copied, too, and the pooling and the n-grams if they
        are the same. A note names the parts that are new.
        """
        trained: Any = loaded.backbone
        if isinstance(model, LinearTextClassifier) or isinstance(trained, LinearTextClassifier):
            raise ValueError(
                f"init={loaded.path}: no model starts from a linear model, nor a linear model from another"
            )
        check_tokenizer(loaded, info.tokenizer)
        is_classifier = isinstance(trained, TextClassifier)
        body: TokenBackbone = trained.body if is_classifier else trained
        # `load_body` checks these itself.
        check_alike(
            model.body, body, ignored=("vocab_size", "tie_embeddings", "direction", "share_directions", "merge")
        )
        model.load_body(body)
        new = []
        if type(trained) is type(model) and loaded.data.get("class_names") == info.class_names:
            model.head.load_state_dict(trained.head.state_dict())
        else:
            new.append("head")
        if is_classifier and trained.pooling.kind == model.pooling.kind:
            model.pooling.load_state_dict(trained.pooling.state_dict())
        elif is_classifier:
            new.append("pooling")
        own, theirs = model.ngrams, trained.ngrams if is_classifier else None
        if own is not None and theirs is not None and (own.longest, own.buckets) == (theirs.longest, theirs.buckets):
            own.load_state_dict(theirs.state_dict())
        elif own is not None:
            new.append("n-grams")
        if new:
            note(model, f"new beside the weights of {loaded.path}: {', '.join(new)}")

    def check_reads(self, model: Any, trained: DocumentInfo, found: DocumentInfo) -> None:
        """Raise ValueError if a model that was trained on documents of `trained` cannot read those of `found`."""
        if found.vocab_size != trained.vocab_size or not have_one_tokenizer(found.tokenizer, trained.tokenizer):
            raise ValueError("the data has another tokenizer than the model was trained with")


def build_classifier(config: Mapping[str, Any], num_classes: int, vocab_size: int, longest: int) -> TextClassifier:
    """The classifier of a configuration; `longest` is the length of learned positions where `max_length` is null.

    ValueError for another model and for options that the model does not have.
    """
    name = config["model"]["name"]
    if name not in MODELS:
        raise ValueError(f"task=document trains model={', '.join(MODELS)} or {linear.MODEL}, not {name}")
    return build_seeded(MODELS[name], config, longest, num_classes=num_classes, vocab_size=vocab_size)
