"""Pairs of documents: one body reads both, each by itself, in every form of a batch."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

import longseq
from longseq.backbones.document_pairs import PairClassifier

SEPARATOR = 9
LENGTHS = ((5, 3), (1, 70), (20, 2))


def build(direction: str = "bidirectional", **options: object) -> PairClassifier:
    torch.manual_seed(0)
    sizes = {"num_classes": 2, "vocab_size": 10, "separator": SEPARATOR, "d_model": 16, "depth": 1}
    model = PairClassifier(**{"mixer": "deltanet", "direction": direction, **sizes, **options}).double()
    torch.nn.init.normal_(model.head[-1].weight)
    return model.eval()


def make_pairs() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    begin = torch.tensor([SEPARATOR])
    return [tuple(torch.cat([begin, torch.randint(9, (length,))]) for length in pair) for pair in LENGTHS]  # type: ignore[misc]


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_packed_padded_and_single_pairs_agree(direction: str) -> None:
    model, pairs = build(direction), [torch.cat(pair) for pair in make_pairs()]
    alone = torch.cat([model(pair[None]) for pair in pairs])
    borders = list(accumulate(map(len, pairs), initial=0))
    packed = model(torch.cat(pairs)[None], torch.tensor([*borders, borders[-1]]))  # and an empty place
    torch.testing.assert_close(packed[:3], alone)
    assert packed[3].isfinite().all()
    longest = max(map(len, pairs))
    padded = torch.stack([torch.nn.functional.pad(pair, (0, longest - len(pair))) for pair in pairs])
    mask = torch.arange(longest) < torch.tensor([len(pair) for pair in pairs])[:, None]
    torch.testing.assert_close(model(padded, mask=mask), alone)


def test_the_head_compares_documents_that_are_read_alone() -> None:
    model = build()
    for first, second in make_pairs():
        u, v = (model.pool(model.forward_features(part[None])) for part in (first, second))
        wanted = model.head(torch.cat([u, v, u * v, u - v], -1))
        torch.testing.assert_close(model(torch.cat([first, second])[None]), wanted)


def test_a_saved_model_gives_the_same_scores(tmp_path: Path) -> None:
    model, (pair, *_) = build(), make_pairs()
    model.float().save_pretrained(tmp_path)
    loaded = longseq.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.eval()(torch.cat(pair)[None]), model(torch.cat(pair)[None]))
