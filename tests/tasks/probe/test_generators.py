"""Each generator compared with a slow form of its definition: labels, duplicates, seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from longseq.tasks.data.generators import CLOSE, MAX, MED, MIN, PADDING
from longseq.tasks.probe.data import make_splits
from longseq.tasks.probe.generators import GENERATORS, IGNORED, Samples, draw, generator_options

SMALL: dict[str, dict[str, Any]] = {
    "compression": {},
    "copy": {"tokens": 16},
    "fuzzy_recall": {"tokens": 48, "shortest_key": 1, "key_size": 2, "value_size": 2},
    "listops": {"depth": 4, "arguments": 4, "operator_probability": 0.5, "shortest": 10, "longest": 60},
    "memorization": {"vocab_size": 21},
    "mqar": {"vocab_size": 40, "tokens": 48, "pairs": 6},
    "mqar_vla": {"vocab_size": 40, "pairs": 6, "tokens": 30},
    "recall": {"tokens": 40, "vocab_size": 20, "noise": 0.3, "noise_vocab_size": 8},
    "regbench": {"vocab_size": 10, "states": (2, 4), "letters": (2, 8), "strings": (2, 4), "string_length": (1, 6)},
    "selective_copying": {"tokens": 24, "copied": 5},
    "state_tracking": {"tokens": 12},
}


def make(name: str, count: int = 60, seed: int = 0, **options: Any) -> Samples:
    generate = partial(GENERATORS[name], **(SMALL[name] | options))
    return draw(generate, np.random.default_rng(seed), count, np.zeros(0, dtype=np.uint64))[0]


def rows(samples: Samples) -> list[tuple[list[int], list[int]]]:
    return list(zip(samples.tokens.tolist(), samples.labels.tolist(), strict=True))


@pytest.mark.parametrize("name", GENERATORS)
def test_seeds_decide_and_nothing_occurs_twice(name: str) -> None:
    one, same, other = make(name), make(name), make(name, seed=1)
    assert np.array_equal(one.tokens, same.tokens)
    assert np.array_equal(one.labels, same.labels)
    assert not np.array_equal(one.tokens, other.tokens)
    assert len(one.tokens) == 60
    assert len({row.tobytes() for row in one.tokens}) == 60
    assert one.tokens.min() >= 0
    assert one.tokens.max() < (generator_options(name) | SMALL[name])["vocab_size"]
    assert ((one.labels == IGNORED) | (one.labels >= 0)).all()
    assert (one.labels != IGNORED).any(axis=1).all()


@pytest.mark.parametrize("filler", ["zero", "random"])
def test_mqar(filler: str) -> None:
    gaps = []
    for tokens, labels in rows(make("mqar", filler=filler)):
        keys, values = tokens[0:12:2], tokens[1:12:2]
        assert len(set(keys)) == len(set(values)) == 6
        assert 1 <= min(keys) <= max(keys) < 20 <= min(values)
        labelled = [place for place, label in enumerate(labels) if label != IGNORED]
        assert len(labelled) == 6
        for place in labelled:
            assert place >= 12
            assert place % 2 == 0
            assert labels[place] == dict(zip(keys, values, strict=True))[tokens[place]]
            gaps.append((place - 12) // 2)
        if filler == "zero":
            assert all(token == 0 for place, token in enumerate(tokens) if place >= 12 and place not in labelled)
    assert {tokens.count(0) > 20 for tokens, _ in rows(make("mqar", filler=filler))} == {filler == "zero"}


def test_mqar_gaps_follow_the_power_law() -> None:
    samples = GENERATORS["mqar"](np.random.default_rng(0), 20000, vocab_size=64, tokens=16, pairs=1)
    places = (samples.labels != IGNORED).argmax(axis=1)
    shares = np.bincount((places - 2) // 2, minlength=7) / 20000
    expected = np.arange(1, 8) ** (0.01 - 1)
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.015)


@pytest.mark.parametrize("keys", [None, (5, 15)])
def test_mqar_vla(keys: tuple[int, int] | None) -> None:
    for tokens, labels in rows(make("mqar_vla", keys=keys)):
        pairs = dict(zip(tokens[0:12:2], tokens[1:12:2], strict=True))
        assert len(pairs) == 6
        assert keys is None or set(pairs) <= set(range(*keys))
        separator, queries = tokens[-7], tokens[-6:]
        assert separator == 39
        assert 39 not in tokens[:-7]
        assert not set(tokens[12:-7]) & set(pairs)
        assert sorted(queries) == sorted(pairs)
        assert labels[:-6] == [IGNORED] * 24
        assert labels[-6:] == [pairs[query] for query in queries]
    assert make("mqar_vla", tokens=None).tokens.shape[1] == 19
    assert any(tokens[-6:] != tokens[0:12:2] for tokens, _ in rows(make("mqar_vla")))


def test_copy() -> None:
    for tokens, labels in rows(make("copy")):
        assert tokens[8] == 127
        assert tokens[9:] == tokens[:7]
        assert labels == [IGNORED] * 8 + tokens[:8]


def test_state_tracking() -> None:
    """The labels of S2 are the parity; those of S4 move the things of a list one permutation after the other."""
    for tokens, labels in rows(make("state_tracking", vocab_size=2)):
        assert labels == (np.cumsum(tokens) % 2).tolist()
    elements = list(itertools.permutations("abcd"))
    for tokens, labels in rows(make("state_tracking", vocab_size=24)):
        moved = "abcd"
        for token, label in zip(tokens, labels, strict=True):
            moved = moved.translate(str.maketrans("abcd", "".join(elements[token])))
            assert moved == "".join(elements[label])
    with pytest.raises(ValueError, match="vocab_size=7"):
        make("state_tracking", vocab_size=7)


def test_selective_copying() -> None:
    places = []
    for tokens, labels in rows(make("selective_copying", count=400)):
        copied = [token for token in tokens[:18] if token != 14]
        places += [place for place, token in enumerate(tokens[:18]) if token != 14]
        assert len(copied) == 5
        assert tokens[18:] == [15] + [14] * 5
        assert labels == [IGNORED] * 19 + copied
    shares = np.bincount(places, minlength=18) / len(places)
    np.testing.assert_allclose(shares, 1 / 18, atol=0.02)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_recall(noise: float) -> None:
    noisy = 0
    for tokens, labels in rows(make("recall", noise=noise)):
        known: dict[int, int] = {}
        expected = [IGNORED] * 40
        for place in range(0, 40, 2):
            key, value = tokens[place : place + 2]
            if key >= 12:
                assert value >= 12
                noisy += 1
                continue
            assert key < 6 <= value < 12
            if key in known:
                assert known[key] == value
                expected[place] = value
            known[key] = value
        assert labels == expected
        assert expected[38] != IGNORED, "the last pair repeats a key"
    assert (noisy > 0) == (noise > 0)


@pytest.mark.parametrize("name", ["recall", "fuzzy_recall"])
def test_training_asks_for_every_next_token(name: str) -> None:
    samples = make(name, label_all=True)
    assert np.array_equal(samples.labels[:, :-1], samples.tokens[:, 1:])
    assert (samples.labels[:, -1] == IGNORED).all()


@pytest.mark.parametrize("shortest", [1, 3])
def test_fuzzy_recall(shortest: int) -> None:
    repeated = 0
    for tokens, labels in rows(make("fuzzy_recall", tokens=64, key_size=3, value_size=3, shortest_key=shortest)):
        assert len(tokens) == 64
        start = next(place for place, token in enumerate(tokens) if token != 15)
        assert 15 not in tokens[start:]
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        expected = [IGNORED] * 64
        place = start
        while place < 64:
            middle = next((p for p in range(place, 64) if tokens[p] >= 7), 64)
            end = next((p for p in range(middle, 64) if tokens[p] < 7), 64)
            key, value = tuple(tokens[place:middle]), tuple(tokens[middle:end])
            assert shortest <= len(key) == len(set(key)) <= 3
            assert 1 <= len(value) == len(set(value)) <= 3
            if key in known:
                assert known[key] == value
                expected[middle - 1 : end - 1] = list(value)
                repeated += 1
            known[key] = value
            place = end
        assert labels == expected
        assert expected[62] != IGNORED
    assert repeated >= 60


def test_memorization() -> None:
    value_of: dict[int, int] = {}
    for tokens, labels in [*rows(make("memorization")), *rows(make("memorization", seed=5))]:
        assert tokens[1::2] == [20] * 16
        assert labels[0::2] == [IGNORED] * 16
        for key, value in zip(tokens[0::2], labels[1::2], strict=True):
            assert key < 10 <= value < 20
            assert value_of.setdefault(key, value) == value
    assert len(set(value_of.values())) == len(value_of) == 10
    assert not np.array_equal(make("memorization", mapping_seed=1).labels, make("memorization").labels)


def test_compression() -> None:
    for tokens, labels in rows(make("compression")):
        assert tokens == labels
        assert tokens[-1] == 15
        assert max(tokens[:-1]) < 15


def test_regbench() -> None:
    samples = make("regbench", count=200)
    assert samples.allowed is not None
    assert samples.identity is not None
    for tokens, labels, allowed, automaton in zip(
        samples.tokens.tolist(), samples.labels.tolist(), samples.allowed.tolist(), samples.identity, strict=True
    ):
        body = tokens[: tokens.index(9)] if 9 in tokens else tokens
        words = " ".join(map(str, body)).split("8")
        assert 2 <= len(words) <= 4
        state = 0
        for place, token in enumerate(body):
            # The automaton, in its canonical numbering, follows the string.
            if token == 8:
                state = 0
            else:
                assert automaton[state, token] >= 0
                state = automaton[state, token]
            following = body[place + 1] if place + 1 < len(body) else 9
            if following >= 8:
                assert labels[place] == IGNORED
                continue
            assert labels[place] == following
            assert allowed[place] == sum(1 << letter for letter in np.flatnonzero(automaton[state] >= 0))
            assert allowed[place] >> following & 1
        assert all(label == IGNORED for label in labels[len(body) :])
        degrees = (automaton >= 0).sum(axis=1)
        assert 1 <= degrees[0] <= 4
    assert len({automaton.tobytes() for automaton in samples.identity}) == 200


def evaluate(tokens: list[int], place: int = 0) -> tuple[int, int]:
    """The value of the expression at `place`, and the position after it."""
    if tokens[place] < 10:
        return tokens[place], place + 1
    operator, values, place = tokens[place], [], place + 1
    while tokens[place] != CLOSE:
        value, place = evaluate(tokens, place)
        values.append(value)
    assert 2 <= len(values) <= 4
    results: dict[int, Callable[[], int]] = {MIN: lambda: min(values), MAX: lambda: max(values)}
    results[MED] = lambda: int(np.median(values))
    return results.get(operator, lambda: sum(values) % 10)(), place + 1


def test_listops() -> None:
    operators = set()
    for tokens, labels in rows(make("listops")):
        value, end = evaluate(tokens)
        assert 10 < end < 60
        assert tokens[end:] == [PADDING] * (59 - end)
        assert labels[end - 1] == value
        assert labels.count(IGNORED) == 58
        operators |= set(tokens[:end]) & set(range(MIN, CLOSE))
    assert len(operators) == 4


def test_splits_share_no_sample() -> None:
    described = {"train": [{"samples": 150}], "validation": [{"samples": 20}], "test": [{"samples": 50}]}
    splits = make_splits("copy", {"vocab_size": 9, "tokens": 6}, described, seed=0)
    counted = [row.numpy().tobytes() for slices in splits.values() for one in slices for row in one.tokens]
    assert len(counted) == len(set(counted)) == 220
    with pytest.raises(ValueError, match="has no 600 different samples"):
        make_splits("copy", {"vocab_size": 9, "tokens": 6}, {"train": [{"samples": 600}]}, seed=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mqar", {"vocab_size": 8, "pairs": 6, "tokens": 48}),
        ("mqar_vla", {"keys": (0, 40)}),
        ("regbench", {"letters": (2, 30)}),
    ],
)
def test_options_that_would_change_the_task_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        make(name, **options)
