"""Generated sequences for several tasks: samples without duplicates, and ListOps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]

IGNORED = -100  # the label of positions without a question
_CHUNK = 8192  # samples that are made at a time
_PATIENCE = 20  # chunks in a row that may have no new sample


class Samples(NamedTuple):
    """Sequences and their questions.

    tokens: `[N, T]`.
    labels: `[N, T]`, the answer at each position, IGNORED without a question.
    allowed: `[N, T]`, the right answers as bits: answer a is right if bit a is set. None: only the label is right.
    identity: `[N, ...]`, what differs between any two samples. None: the tokens.
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
    """Make `count` different samples that are not in `seen`; returns them and all hashes.

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
            raise ValueError(f"the generator has no {count} different samples, only {found}")
        made = made.take(fresh)
        identity = None if made.identity is None else _narrowest(made.identity)
        parts.append(made._replace(tokens=_narrowest(made.tokens), labels=_narrowest(made.labels), identity=identity))
        seen = np.concatenate([seen, hashes[fresh]])
        found += fresh.size
    joined = [None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)]
    return Samples(*joined), seen  # type: ignore[arg-type]


def _narrowest(numbers: Integers) -> Integers:
    """Numbers of at least IGNORED in 16 or 32 bits, because sets are kept in memory."""
    return numbers.astype(np.int16) if numbers.max(initial=0) < 2**15 else numbers.astype(np.int32)


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
    """Draw `count` different numbers of [low, high) for each sample, in random order: `[samples, count]`."""
    size = high - low
    if count > size:
        raise ValueError(f"{count} different tokens cannot be drawn from {size}: raise vocab_size")
    if 2 * count > size:
        return low + random.random((samples, size)).argsort(axis=1)[:, :count]
    drawn = random.integers(low, high, (samples, count))
    # Only repeated numbers are drawn again, so every outcome stays equally likely.
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


# ListOps: nested operations on lists of digits. Digits are their own tokens; these are the others.
MIN, MAX, MED, SM, CLOSE, PADDING = range(10, 16)


class _Level(NamedTuple):
    """The nodes of all trees at one depth: tree, parent (index into the level above), token (digit or operator)."""

    tree: Integers
    parent: Integers
    token: Integers


def listops(
    random: np.random.Generator,
    samples: int,
    *,
    vocab_size: int = 16,
    depth: int = 10,
    arguments: int = 10,
    operator_probability: float = 0.25,
    shortest: int = 500,
    longest: int = 2000,
) -> Samples:
    """Expressions of MIN, MAX, MED (rounded down) and SM (sum modulo 10); the label of the last token is the result.

    A node is an operator with 2 to `arguments` arguments with `operator_probability`, else a digit, and always a digit
    at `depth`. Expressions with more than `shortest` and fewer than `longest` tokens are kept. An operator, a digit and
    a closing bracket are one token each. Padding is on the right. `vocab_size`, the model's, is at least 16.

    Source: ListOps (Nangia and Bowman, 2018), with the parameters of Long Range Arena (Tay et al., 2020), section 2.2.
    """
    parts: list[tuple[Integers, Integers]] = []
    found = 0
    for _ in range(10_000):
        levels, lengths = _grow(random, 2048, depth, arguments, operator_probability)
        levels, lengths = _keep(levels, lengths, (lengths > shortest) & (lengths < longest))
        parts.append(_write(levels, lengths, longest - 1))
        found += len(lengths)
        if found >= samples:
            break
    else:
        raise ValueError(f"no {samples} expressions of {shortest} to {longest} tokens were found; widen the lengths")
    tokens, labels = (np.concatenate(column)[:samples] for column in zip(*parts, strict=True))
    return Samples(tokens, labels)


def _grow(
    random: np.random.Generator, trees: int, depth: int, arguments: int, probability: float
) -> tuple[list[_Level], Integers]:
    """Grow trees level by level; returns the levels and the number of tokens of each tree."""
    levels: list[_Level] = []
    tree, parent = np.arange(trees), np.arange(trees)
    lengths = np.zeros(trees, dtype=np.int64)
    for level in range(depth):
        nodes = len(tree)
        operator = (random.random(nodes) < probability) & (level < depth - 1)
        token = np.where(operator, random.integers(MIN, CLOSE, nodes), random.integers(0, 10, nodes))
        levels.append(_Level(tree, parent, token))
        lengths += np.bincount(tree, weights=1 + operator, minlength=trees).astype(np.int64)
        above = np.flatnonzero(operator)
        parent = np.repeat(above, random.integers(2, arguments, len(above), endpoint=True))
        tree = tree[parent]
    return levels, lengths


def _keep(levels: list[_Level], lengths: Integers, kept: np.ndarray) -> tuple[list[_Level], Integers]:
    """Drop the trees that are not kept, and renumber the others."""
    number = kept.cumsum() - 1
    result = []
    above = number
    for level in levels:
        stays = kept[level.tree]
        result.append(_Level(number[level.tree[stays]], above[level.parent[stays]], level.token[stays]))
        above = stays.cumsum() - 1
    return result, lengths[kept]


def _write(levels: list[_Level], lengths: Integers, width: int) -> tuple[Integers, Integers]:
    """Tokens and labels `[N, width]` of trees."""
    values: list[Integers] = []
    sizes: list[Integers] = []
    for index in reversed(range(len(levels))):
        value, size = levels[index].token.copy(), np.ones(len(levels[index].token), dtype=np.int64)
        if index + 1 < len(levels) and len(levels[index + 1].parent):
            nodes, starts, counts = np.unique(levels[index + 1].parent, return_index=True, return_counts=True)
            value[nodes] = _evaluate(levels[index].token[nodes], values[0], starts, counts)
            size[nodes] = 2 + np.add.reduceat(sizes[0], starts)
        values.insert(0, value)
        sizes.insert(0, size)
    tokens = np.full((len(lengths), width), PADDING)
    place = np.zeros(len(lengths), dtype=np.int64)
    for index, level in enumerate(levels):
        if index > 0:
            before = sizes[index].cumsum() - sizes[index]
            _, starts, inverse = np.unique(level.parent, return_index=True, return_inverse=True)
            place = place[level.parent] + 1 + before - before[starts][inverse]
        tokens[level.tree, place] = level.token
        operator = level.token >= MIN
        tokens[level.tree[operator], place[operator] + sizes[index][operator] - 1] = CLOSE
    labels = np.full_like(tokens, IGNORED)
    labels[np.arange(len(lengths)), lengths - 1] = values[0]
    return tokens, labels


def _evaluate(operator: Integers, values: Integers, starts: Integers, counts: Integers) -> Integers:
    """Apply each operator to its run of `values`, which begins at `starts` and has `counts` entries."""
    run = np.repeat(np.arange(len(starts)), counts)
    ordered = values[np.lexsort((values, run))]
    middle = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
    smallest, largest = ordered[starts], ordered[starts + counts - 1]
    total = np.add.reduceat(values, starts) % 10
    return np.select([operator == MIN, operator == MAX, operator == MED], [smallest, largest, middle], total)
