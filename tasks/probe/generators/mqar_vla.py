"""Multi-query associative recall in the form of the VLA paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longseq.tasks.data.generators import IGNORED, Samples, distinct


def mqar_vla(
    random: np.random.Generator,
    samples: int,
    *,
    vocab_size: int = 128,
    pairs: int = 8,
    tokens: int | None = None,
    keys: Sequence[int] | None = None,
) -> Samples:
    """Pairs k1 v1 ... kn vn, a separator (the last token of the vocabulary), then the keys in another order.

    The value of each key after the separator is asked there. Keys are different tokens of `keys = [low, high)`, by
    default all tokens but the separator; values are any tokens but the separator. `tokens` is 3n + 1 by default. With
    more, tokens that are not keys of the sample fill the space between the pairs and the separator (the paper names no
    filling).

    Source: Variational Linear Attention, section 5.2 and figure 1.
    """
    separator, shortest = vocab_size - 1, 3 * pairs + 1
    length = shortest if tokens is None else tokens
    if length < shortest:
        raise ValueError(f"tokens={tokens} is too short for {pairs} pairs")
    low, high = (0, separator) if keys is None else keys
    if not 0 <= low < high <= separator:
        raise ValueError(f"keys=[{low}, {high}] must lie in [0, {separator}]")
    key = distinct(random, samples, pairs, low, high)
    value = random.integers(0, separator, (samples, pairs))
    sequence = np.full((samples, length), separator)
    sequence[:, 0 : 2 * pairs : 2] = key
    sequence[:, 1 : 2 * pairs : 2] = value
    if length > shortest:
        sequence[:, 2 * pairs : -pairs - 1] = _others(random, key, separator, length - shortest)
    order = random.random((samples, pairs)).argsort(axis=1)
    sequence[:, -pairs:] = np.take_along_axis(key, order, axis=1)
    labels = np.full_like(sequence, IGNORED)
    labels[:, -pairs:] = np.take_along_axis(value, order, axis=1)
    return Samples(sequence, labels)


def _others(random: np.random.Generator, key: np.ndarray, size: int, count: int) -> np.ndarray:
    """Draw `count` tokens of [0, size) for each row of `key [N, n]`, other than the keys of the row."""
    samples, pairs = key.shape
    taken = np.zeros((samples, size), dtype=bool)
    np.put_along_axis(taken, key, True, axis=1)
    free = taken.argsort(axis=1, kind="stable")  # the free tokens first
    return np.take_along_axis(free, random.integers(0, size - pairs, (samples, count)), axis=1)
