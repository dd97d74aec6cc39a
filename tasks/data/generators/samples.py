"""Samples: the result of a generator, and the removal of duplicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]

# The label of positions without a question.
IGNORED = -100

# Samples are made _CHUNK at a time, which bounds the memory; the second number is how often this may yield nothing new.
_CHUNK = 8192
_PATIENCE = 20


class Samples(NamedTuple):
    """Sequences and their questions.

    tokens: `[N, T]`.
    labels: `[N, T]`, the answer at each position, IGNORED without a question.
    allowed: `[N, T]`, the right answers as bits: answer a is right if bit a is set. None: only the label is right.
    identity: `[N, ...]`, which must differ between any two samples. None: the tokens.
    """

    tokens: Integers
    labels: Integers
    allowed: Integers | None = None
    identity: Integers | None = None

    def take(self, rows: Integers) -> Samples:
        """Select samples."""
        return Samples(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


Make = Callable[[np.random.Generator, int], Samples]


def draw(make: Make, random: np.random.Generator, count: int, seen: Integers) -> tuple[Samples, Integers]:
    """Make `count` different samples, whose hashes are not in `seen`; returns them and all hashes.

    ValueError if the generator cannot make so many.
    """
    parts: list[Samples] = []
    found = barren = 0
    while found < count:
        made = make(random, min(_CHUNK, count - found))
        hashes = row_hashes(made.tokens if made.identity is None else made.identity)
        _, first = np.unique(hashes, return_index=True)
        fresh = np.sort(first[~np.isin(hashes[first], seen)])
        barren = 0 if fresh.size else barren + 1
        if barren == _PATIENCE:
            raise ValueError(
                f"the probe has no {count} different samples: {found} were found and then none in {_PATIENCE} tries; "
                "ask for fewer samples, or for longer sequences"
            )
        parts.append(_narrowed(made.take(fresh)))
        seen = np.concatenate([seen, hashes[fresh]])
        found += fresh.size
    return _joined(parts), seen


def row_hashes(rows: Integers) -> Integers:
    """A 64-bit hash of each row of `rows [N, ...]`. A collision only replaces one sample by another."""
    flat = rows.reshape(len(rows), -1).astype(np.uint64)
    places = np.random.default_rng(0).integers(0, 2**63, flat.shape[1], dtype=np.uint64)
    state = flat + places
    # The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state.sum(axis=1, dtype=np.uint64)


def distinct(random: np.random.Generator, samples: int, count: int, low: int, high: int) -> Integers:
    """Draw `count` different numbers of [low, high) for each sample, in random order: `[samples, count]`.

    Raises:
        ValueError: there are fewer than `count` numbers.
    """
    size = high - low
    if count > size:
        raise ValueError(f"{count} different tokens cannot be drawn from {size}: ask for fewer, or raise vocab_size")
    if 2 * count > size:
        return low + random.random((samples, size)).argsort(axis=1)[:, :count]
    drawn = random.integers(low, high, (samples, count))
    # Drawing a repeated number again treats all numbers alike, so that every outcome stays equally likely.
    repeats = _repeats(drawn)
    while repeats.any():
        drawn[repeats] = random.integers(low, high, int(repeats.sum()))
        touched = repeats.any(axis=1)
        repeats[touched] = _repeats(drawn[touched])
    return drawn


def _repeats(numbers: Integers) -> NDArray[np.bool_]:
    """Mark the numbers that occur earlier in their row."""
    order = numbers.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(numbers, order, axis=1)
    again = np.zeros(numbers.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    marks = np.zeros_like(again)
    np.put_along_axis(marks, order, again, axis=1)
    return marks


def next_token_labels(tokens: Integers, labelled: NDArray[np.bool_] | None = None) -> Integers:
    """Labels `[N, T]`: at each position the next token, where `labelled [N, T]` is true (None: everywhere)."""
    labels = np.full(tokens.shape, IGNORED, dtype=tokens.dtype)
    labels[:, :-1] = tokens[:, 1:]
    return labels if labelled is None else np.where(labelled, labels, IGNORED)


def _narrowed(samples: Samples) -> Samples:
    """Convert to the smallest types: sets are kept in memory."""
    identity = None if samples.identity is None else _narrowest(samples.identity)
    return samples._replace(tokens=_narrowest(samples.tokens), labels=_narrowest(samples.labels), identity=identity)


def _narrowest(numbers: Integers) -> Integers:
    """The same numbers in 16 bits if they fit, and in 32 otherwise; none is below IGNORED."""
    return numbers.astype(np.int16) if numbers.max(initial=0) < 2**15 else numbers.astype(np.int32)


def _joined(parts: list[Samples]) -> Samples:
    joined = [None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)]
    return Samples(*joined)  # type: ignore[arg-type]
