"""Classifiers of documents: packed, padded and single documents agree; files, initial weights and wrong options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases
from torch import Tensor

import longseq
from longseq import mixers
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.pooling import POOLINGS, Pooling
from longseq.kernels.packing import Packing

LENGTHS = [5, 0, 1, 3]  # of packed documents, one of them an empty slot
BORDERS = torch.tensor([0, 5, 5, 6, 9])
SMALL = {"num_heads": 2, "num_slots": 3, "state_size": 4, "max_length": 8, "window": 2}


def make(mixer: str = "deltanet", **options: Any) -> TextClassifier:
    torch.manual_seed(0)
    own = {key: value for key, value in SMALL.items() if key in mixers.options(mixer)}
    usual = {"num_classes": 3, "vocab_size": 7, "d_model": 16, "depth": 1, "mlp": None, "mixer_options": own}
    model = TextClassifier(**{**usual, "mixer": mixer, **options}).double().eval()
    with torch.no_grad():
        model.head.weight.mul_(50)
    return model


def make_documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(7, (1, length), generator=generator) for length in LENGTHS]


def pad(documents: list[Tensor], *, left: bool = False) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([document.shape[1] for document in documents])[:, None]
    most = int(lengths.max())
    real = torch.arange(most) >= most - lengths if left else torch.arange(most) < lengths
    tokens = torch.zeros(real.shape, dtype=torch.long)
    tokens[real] = torch.cat(documents, dim=1)[0]
    return tokens, real


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mixer", mixers.mixer_names())
def test_packed_and_padded_documents_are_scored_as_if_alone(mixer: str) -> None:
    documents = make_documents()
    whole = [document for document in documents if document.shape[1]]
    weights = torch.linspace(-1, 2, 3 * len(whole), dtype=torch.float64).view(-1, 3)
    tokens, mask = pad(whole)
    readings: list[dict[str, Any]] = [
        {},
        {"direction": "bidirectional"},
        {"direction": "alternating", "depth": 2, "positions": "learned", "max_length": 5},
    ]
    for reading in readings:
        model = make(mixer, **reading)

        def gradients(logits: Tensor, model: TextClassifier = model) -> tuple[Tensor, ...]:
            return torch.autograd.grad((logits * weights).sum(), list(model.parameters()))

        alone = torch.cat([model(document) for document in whole])
        packed = model(torch.cat(documents, dim=1), BORDERS)
        padded = model(tokens, mask=mask)
        assert packed[1].isfinite().all()
        packed = packed[[0, 2, 3]]
        assert (alone[0] - alone[1]).abs().max() > 1e-3
        assert_same(packed, alone)
        assert_same(padded, alone)
        expected = gradients(alone)
        assert_same(gradients(packed), expected)
        assert_same(gradients(padded), expected)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("spoilt", [float("inf"), float("nan")])
def test_a_document_that_is_not_finite_spoils_no_other(pooling: str, spoilt: float) -> None:
    pool = Pooling(pooling, 4).double()
    pool.reset_parameters()
    whole = torch.randn(1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    features = whole.clone()
    features[0, 5:6] = spoilt  # all tokens of the document between 5 and 6
    found = pool(features, packing=Packing(BORDERS, 9))
    assert not found[2].isfinite().any()
    others = [0, 1, 3]
    assert torch.equal(found[others], pool(whole, packing=Packing(BORDERS, 9))[others])


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.slow
def test_every_pooling_and_sharing_reads_batches_as_single_documents(pooling: str) -> None:
    documents = [document for document in make_documents() if document.shape[1]]
    turned = [document.flip(1) for document in documents]
    row = torch.cat(documents, dim=1)
    for sharing in ("projections", "none"):
        model = make(direction="bidirectional", pooling=pooling, share_directions=sharing, positions="learned",
                     max_length=5, depth=2)  # fmt: skip
        alone = torch.cat([model(document) for document in documents])
        packing = Packing(torch.tensor([0, 5, 6, 9]))
        assert_same(model(row, packing), alone)
        for left in (False, True):
            tokens, mask = pad(documents, left=left)
            assert_same(model(tokens, mask=mask), alone)
        flipped = model(row.flip(1), packing.turned())
        assert_same(flipped.flip(0), torch.cat([model(document) for document in turned]))
        assert (flipped.flip(0) - alone)[0].abs().max() > 1e-6, "the model sees no order"


@cases("direction", ["forward", "bidirectional"])
def test_ngrams_of_batches_are_those_of_single_documents(direction: str) -> None:
    documents = [document for document in make_documents() if document.shape[1]]
    model = make(direction=direction, hashed_ngrams=3, ngram_buckets=50)
    assert model.ngrams is not None
    with torch.no_grad():
        for table in model.ngrams.tables:
            table.weight.mul_(50)
    alone = torch.cat([model(document) for document in documents])
    assert_same(model(torch.cat(documents, dim=1), torch.tensor([0, 5, 6, 9])), alone)
    for left in (False, True):
        tokens, mask = pad(documents, left=left)
        assert_same(model(tokens, mask=mask), alone)


def test_ngrams_end_at_their_token_and_have_a_table_for_each_length() -> None:
    model = make(hashed_ngrams=3, ngram_buckets=5000)  # so many that no two n-grams meet
    ngrams: Any = model.ngrams
    text = torch.tensor([[1, 2, 1, 2, 3, 1, 2, 0, 0]])
    found = ngrams(text, torch.arange(9)[None])[0]
    pairs, triples = (table.weight for table in ngrams.tables)
    assert len(found.unique(dim=0)) == 9, "each place has another pair or triple"
    assert torch.equal(ngrams(text[:, 2:4], torch.arange(2)[None])[0], ngrams(text[:, :2], torch.arange(2)[None])[0])
    assert torch.equal(ngrams(text[:, 2:], torch.arange(2, 9)[None], text[:, :2])[0], found[2:])
    found.sum().backward()
    assert [int((one.grad.abs().sum(1) > 0).sum()) for one in (pairs, triples)] == [7, 9]


def test_a_forward_model_does_not_see_what_follows_and_an_encoder_does() -> None:
    document, changed = torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[0, 1, 2, 3, 5]])
    for direction, sees in (("forward", False), ("bidirectional", True), ("alternating", True)):
        model = make(direction=direction, depth=2)
        features = [model.forward_features(tokens)[0, 0] for tokens in (document, changed)]
        assert ((features[0] - features[1]).abs().max() > 1e-6) == sees, direction


@cases("kind", POOLINGS)
@cases("dtype", [torch.float64, torch.bfloat16])
def test_pooling_is_a_plain_loop(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pooling = Pooling(kind, 4).double()
    x = torch.randn(1, 9, 4, dtype=torch.float64).to(dtype)
    pooling.to(dtype)

    def loop(one: Tensor) -> Tensor:  # [T, D]
        if kind in ("first", "last"):
            return one[0 if kind == "first" else -1]
        if kind == "max":
            return torch.stack([max(one[:, channel]) for channel in range(4)])
        weights = torch.full((len(one),), 1 / len(one), dtype=torch.float64)
        if kind == "attention":
            (w, b), (v,) = pooling.projection.parameters(), pooling.query.weight.double()
            weights = torch.stack([v @ torch.tanh(w.double() @ token + b.double()) for token in one.double()]).exp()
            weights = weights / weights.sum()
        return sum(weight * token.double() for weight, token in zip(weights, one, strict=True))

    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-2}
    expected = [loop(one).to(dtype) if len(one) else torch.zeros(4, dtype=dtype) for one in x[0].split(LENGTHS)]
    pooled = pooling(x, packing=Packing(BORDERS))
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled, torch.stack(expected), **tolerance)
    rows, mask = torch.full((2, 5, 4), torch.nan, dtype=dtype), torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]).bool()
    rows[0], rows[1, 1:4] = x[0, :5], x[0, 6:]
    torch.testing.assert_close(pooling(rows, mask=mask), torch.stack([expected[0], expected[3]]), **tolerance)
    torch.testing.assert_close(pooling(x[:, :5]), expected[0][None], **tolerance)
    assert torch.equal(pooling(x[:, :0]), torch.zeros(1, 4, dtype=dtype))


def test_a_classifier_is_saved_with_every_argument(tmp_path: Path) -> None:
    options: dict[str, Any] = {"pooling": "attention", "head_dropout": 0.3, "hashed_ngrams": 2, "ngram_buckets": 30}
    model = make("gla", direction="bidirectional", **options).float()
    model.save_pretrained(tmp_path)
    loaded = longseq.from_pretrained(tmp_path, backend="reference")
    row = torch.cat(make_documents(), dim=1)
    torch.testing.assert_close(loaded(row, BORDERS), model(row, BORDERS))
    arguments = model.saved_arguments()
    assert {"num_classes": 3, **options}.items() <= arguments.items()
    body = model.body.saved_arguments()
    assert body.pop("tie_embeddings") is True
    assert body.items() <= arguments.items()
    assert arguments == loaded.saved_arguments()
    assert "pipeline_tag: text-classification" in (tmp_path / "README.md").read_text()


def language_model(mixer: str = "deltanet", **options: Any) -> TokenBackbone:
    torch.manual_seed(5)
    usual = {"vocab_size": 7, "d_model": 16, "depth": 1, "mlp": None, "tie_embeddings": False, "mixer": mixer}
    model = TokenBackbone(**{**usual, **options}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def starting_from(model: TokenBackbone, **options: Any) -> TextClassifier:
    arguments = {**model.arguments, **options}
    del arguments["tie_embeddings"]
    new = TextClassifier(num_classes=2, **arguments).double().eval()
    new.load_body(model)
    return new


@cases("mixer", ["attention", "deltanet", "longhorn", "mamba2", "abc", "2xdeltanet+attention"])
def test_a_forward_classifier_starts_with_the_features_of_the_language_model(mixer: str) -> None:
    model = language_model(mixer, depth=3, mlp="swiglu", positions="learned", max_length=9)
    tokens = torch.cat(make_documents(), dim=1)
    assert_same(starting_from(model).forward_features(tokens), model.forward_features(tokens)[0])


@cases("mixer", ["deltanet", "mamba2", "rwkv4"])
@cases("sharing", ["projections", "none"])
@cases("merge", ["sum", "mean"])
@pytest.mark.slow
def test_a_bidirectional_layer_starts_as_the_mean_of_two_readings_by_the_language_models(
    mixer: str, sharing: str, merge: str
) -> None:
    model, tokens = language_model(mixer), torch.cat(make_documents(), dim=1)
    x, block = model.embedding(tokens), model.blocks[0]

    def read(tokens: Tensor) -> Tensor:
        return block.mixer(block.norm1(tokens))[0]

    expected = model.norm(x + (read(x) + read(x.flip(1)).flip(1)) / 2)
    new = starting_from(model, direction="bidirectional", share_directions=sharing, merge=merge)
    assert_same(new.forward_features(tokens), expected)


@cases(
    "options",
    [{"norm_eps": 1e-3}, {"mixer_options": {"key_norm": "l1"}}, {"vocab_size": 8}, {"depth": 2}, {"max_length": 12}],
)
def test_a_body_of_another_model_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"the model that this one starts from|size mismatch"):
        starting_from(language_model(positions="learned", max_length=9), **options)
