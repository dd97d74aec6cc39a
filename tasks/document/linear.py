"""The bar for document classifiers: scikit-learn's logistic regression on TF-IDF, fitted to the documents of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from longseq.backbones.linear_text import LinearTextClassifier
from longseq.tasks.document.batch import Split
from longseq.tasks.document.config import LinearModelKeys
from longseq.tasks.document.info import DocumentInfo
from longseq.tasks.document.metrics import make_scores
from longseq.tasks.training import targets
from longseq.tasks.training.metrics import decide, update_metrics

# The name of the model in `config.model`.
MODEL = "linear"

# The documents that are scored at once.
_BATCH = 64


def read_documents(split: Split) -> Iterator[tuple[Sequence[int], Any]]:
    """Each document of a split as a model reads it, after truncation: its tokens and its target."""
    for number in range(split.documents):
        yield split.read(number).tolist(), split.targets[number]


def fit_linear(
    documents: Iterable[tuple[Sequence[int], Any]], info: DocumentInfo, keys: LinearModelKeys
) -> LinearTextClassifier:
    """The linear model of training documents: their tokens, and their classes, or `[C]` zeros and ones for labels."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    empty = LinearTextClassifier(num_classes=info.num_classes, ngrams=keys.ngrams)
    empty.text = _text_of(info)
    wanted: list[Any] = []

    def texts() -> Iterable[str]:
        for tokens, target in documents:
            wanted.append(target)
            yield empty.read(tokens)

    vectorizer = TfidfVectorizer(analyzer=empty.grams, sublinear_tf=True, min_df=keys.min_documents, dtype=np.float32)
    values = vectorizer.fit_transform(texts())
    vocabulary = vectorizer.get_feature_names_out().tolist()
    model = LinearTextClassifier(num_classes=info.num_classes, vocabulary=vocabulary, ngrams=keys.ngrams)
    model.text = _text_of(info)
    coefficients, bias = _regress(values, np.asarray(wanted), info, keys.inverse_regularization)
    with torch.no_grad():
        model.inverse_frequency.copy_(torch.from_numpy(vectorizer.idf_))
        model.coefficients.copy_(torch.from_numpy(coefficients))
        model.bias.copy_(torch.from_numpy(bias))
    return model


def _regress(values: Any, wanted: np.ndarray, info: DocumentInfo, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients `[V, C]` and bias `[C]` of a logistic regression, or of one for each of several labels."""
    from sklearn.linear_model import LogisticRegression

    coefficients = np.zeros((values.shape[1], info.num_classes))
    bias = np.zeros(info.num_classes)
    if info.multi_label:
        for label, given in enumerate(wanted.T.astype(int)):
            if given.min() == given.max():  # no document, or each one, has the label
                bias[label] = np.log((given.sum() + 0.5) / (len(given) - given.sum() + 0.5))
                continue
            found = LogisticRegression(C=strength, max_iter=1000).fit(values, given)
            coefficients[:, label], bias[label] = found.coef_[0], found.intercept_[0]
        return coefficients, bias
    found = LogisticRegression(C=strength, max_iter=1000).fit(values, wanted)
    assert len(found.classes_) == info.num_classes, "each class has training documents"
    own = slice(1, None) if info.num_classes == 2 else slice(None)  # of two classes scikit-learn keeps the difference
    coefficients[:, own], bias[own] = found.coef_.T, found.intercept_
    return coefficients, bias


def _text_of(info: DocumentInfo) -> dict[str, Any] | None:
    return None if info.tokenizer is None else {"tokenizer": info.tokenizer, "window": info.window}


@targets.register("callback")
class LinearBaseline(Callback):
    """Fits the linear model to the training documents of a run, and measures it on the test documents.

    The model reads the documents as the run's model does, after truncation. The metrics are those of the task, in
    metrics.json `test/linear_accuracy` and so on. A run with more than `most_documents` training documents leaves it
    out and says so; model=linear measures it then. Its time is not part of the run's `seconds`.
    """

    def __init__(self, most_documents: int = 50_000) -> None:
        self.most_documents = most_documents
        self.scores: dict[str, float] = {}
        self.documents = 0

    @rank_zero_only
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        info: DocumentInfo = data.info
        if isinstance(pl_module.backbone, LinearTextClassifier):
            return
        self.documents = info.sizes["train"] or 0
        if self.documents > self.most_documents:
            return
        model = fit_linear(read_documents(data.split("train")), info, LinearModelKeys())
        self.scores = measure(model, read_documents(data.split("test")), info)

    def describe(self) -> str:
        """The accuracy of the linear model in a few words."""
        if not self.scores:
            return f"not measured with {self.documents:,} training documents: train model=linear"
        return f"{self.scores['accuracy']:.4f} by TF-IDF and logistic regression on the same documents"


@torch.inference_mode()
def measure(
    model: LinearTextClassifier, documents: Iterable[tuple[Sequence[int], Any]], info: DocumentInfo
) -> dict[str, float]:
    """The metrics of the task for a linear model, on documents and their targets: all of those, on this process."""
    scores = make_scores(info.num_classes, info.multi_label)
    for metric in scores.values():
        metric.distributed_available_fn = _no  # the other processes of a run are not here
    listed = list(documents)
    for start in range(0, len(listed), _BATCH):
        part = listed[start : start + _BATCH]
        logits = model.score([model.read(tokens) for tokens, _ in part]).double()  # see ClassifierModule.rankable
        given: Tensor = torch.as_tensor(np.asarray([target for _, target in part])).long()
        probabilities = logits.sigmoid() if info.multi_label else logits.softmax(dim=1)
        update_metrics(scores, probabilities, decide(probabilities, None, multi_label=info.multi_label), given)
    return {name: float(metric.compute()) for name, metric in scores.items()}


def _no() -> bool:
    return False
