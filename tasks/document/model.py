"""The models of document classifiers: classifiers on the body of a token model, and the fitted linear baseline."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from longseq.backbones.classifier import TextClassifier
from longseq.backbones.document_pairs import PairClassifier
from longseq.backbones.linear_text import LinearTextClassifier
from longseq.tasks.document.batch import Split
from longseq.tasks.document.config import DocumentInfo, DocumentModelKeys, LinearModelKeys
from longseq.tasks.training.checkpoint import Loaded
from longseq.tasks.training.configuration import BodyKeys
from longseq.tasks.training.model import TaskModel
from longseq.tasks.training.token_model import body_like, build_seeded, check_tokenizer

_log = logging.getLogger(__name__)

# The values of `config.model.name`.
MODELS: Mapping[str, type[TextClassifier]] = {"document": TextClassifier, "document_pair": PairClassifier}
LINEAR = "linear"

Documents = Iterable[tuple[Sequence[int], Any]]


class DocumentModel(TaskModel):
    """Builds the classifier that `config.model` describes, for the classes and the vocabulary of the documents."""

    starts_from = ("lm",)

    def like(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        kind = saved.get("kind")
        if kind in MODELS:
            return {"defaults": [kind, "_self_"], **body_like(saved, DocumentModelKeys)}
        if kind != "token":
            return {}
        body = body_like(saved, BodyKeys)
        del body["direction"]  # a language model reads forward
        return {"defaults": ["document", "_self_"], **body}

    def build(self, config: Mapping[str, Any], info: DocumentInfo) -> nn.Module:
        """The model of a configuration; an option that is null has the model's default.

        The linear model is empty until the run fits it.
        """
        name = config["model"]["name"]
        if name == LINEAR:
            return LinearTextClassifier(num_classes=info.num_classes, ngrams=config["model"]["ngrams"])
        options = {"num_classes": info.num_classes, "vocab_size": info.vocab_size}
        return build_seeded(MODELS[name], config, info.window, **options)

    def start_from(self, model: Any, loaded: Loaded, info: Any) -> None:
        """Copy the body of a language model or of another classifier (see `TextClassifier.load_body`).

        A classifier of the same kind and classes also gives its head, and its pooling and n-grams if they are of the
        same form. ValueError for another tokenizer, and for options by which the same weights compute something else.
        """
        trained: Any = loaded.backbone
        if isinstance(model, LinearTextClassifier) or isinstance(trained, LinearTextClassifier):
            raise ValueError(f"init={loaded.path}: a linear model is neither an init nor starts from one")
        check_tokenizer(loaded, info.tokenizer)
        is_classifier = isinstance(trained, TextClassifier)
        model.load_body(trained.body if is_classifier else trained)
        own, theirs = model.ngrams, getattr(trained, "ngrams", None)
        fits = {
            "head": type(trained) is type(model) and loaded.data.get("class_names") == info.class_names,
            "pooling": is_classifier and trained.pooling.kind == model.pooling.kind,
            "ngrams": own is not None
            and theirs is not None
            and (own.longest, own.buckets) == (theirs.longest, theirs.buckets),
        }
        for name in (name for name, copied in fits.items() if copied):
            getattr(model, name).load_state_dict(getattr(trained, name).state_dict())
        if new := [name for name, copied in fits.items() if not copied and getattr(model, name) is not None]:
            _log.warning("not in the weights of %s, and new: %s", loaded.path, ", ".join(new))


def read_documents(split: Split) -> Iterator[tuple[Sequence[int], Any]]:
    """The tokens, after truncation, and the target of each document of a split."""
    for number in range(split.documents):
        yield split.read(number).tolist(), split.targets[number]


def fit_linear(
    documents: Documents, validation: Documents, info: DocumentInfo, keys: LinearModelKeys
) -> LinearTextClassifier:
    """Fit logistic regression on TF-IDF to documents: pairs of tokens, and the class or `[C]` labels of 0 and 1.

    Of several `inverse_regularization`, the one with the lowest loss on the `validation` documents is chosen.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    empty = LinearTextClassifier(num_classes=info.num_classes, ngrams=keys.ngrams)
    empty.text = None if info.tokenizer is None else {"tokenizer": info.tokenizer, "window": info.window}
    targets: list[Any] = []
    wanted: list[Any] = []

    def read(documents: Documents, targets: list[Any]) -> Iterator[str]:
        for tokens, target in documents:
            targets.append(target)
            yield empty.read(tokens)

    vectorizer = TfidfVectorizer(analyzer=empty.grams, sublinear_tf=True, min_df=keys.min_documents, dtype=np.float32)
    values = vectorizer.fit_transform(read(documents, targets))
    vocabulary = vectorizer.get_feature_names_out().tolist()
    model = LinearTextClassifier(num_classes=info.num_classes, vocabulary=vocabulary, ngrams=keys.ngrams)
    model.text = empty.text
    fits = [_regress(values, np.asarray(targets), info, strength) for strength in keys.inverse_regularization]
    if len(fits) > 1:
        held = vectorizer.transform(read(validation, wanted))
        loss = functional.binary_cross_entropy_with_logits if info.multi_label else functional.cross_entropy
        expected = torch.from_numpy(np.asarray(wanted))
        fits.sort(key=lambda fit: float(loss(torch.from_numpy(held @ fit[0] + fit[1]), expected)))
    coefficients, bias = fits[0]
    with torch.no_grad():
        model.inverse_frequency.copy_(torch.from_numpy(vectorizer.idf_))
        model.coefficients.copy_(torch.from_numpy(coefficients))
        model.bias.copy_(torch.from_numpy(bias))
    return model


def _regress(values: Any, targets: np.ndarray, info: DocumentInfo, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients `[V, C]` and bias `[C]` of a logistic regression, or of one for each of several labels."""
    from sklearn.linear_model import LogisticRegression

    coefficients = np.zeros((values.shape[1], info.num_classes))
    bias = np.zeros(info.num_classes)
    if info.multi_label:
        for label, given in enumerate(targets.T.astype(int)):
            if given.min() == given.max():  # no document, or each one, has the label
                bias[label] = np.log((given.sum() + 0.5) / (len(given) - given.sum() + 0.5))
                continue
            found = LogisticRegression(C=strength, max_iter=1000).fit(values, given)
            coefficients[:, label], bias[label] = found.coef_[0], found.intercept_[0]
        return coefficients, bias
    found = LogisticRegression(C=strength, max_iter=1000).fit(values, targets)
    assert len(found.classes_) == info.num_classes, "each class has training documents"
    own = slice(1, None) if info.num_classes == 2 else slice(None)  # of two classes scikit-learn keeps the difference
    coefficients[:, own], bias[own] = found.coef_.T, found.intercept_
    return coefficients, bias
