"""RegBench: strings of a random automaton, which the model has to infer."""

from __future__ import annotations

import numpy as np

from longseq.tasks.data.generators import IGNORED, Integers, Samples

MOST_LETTERS = 62


def regbench(
    random: np.random.Generator,
    samples: int,
    *,
    vocab_size: int = 20,
    states: tuple[int, int] = (4, 12),
    letters: tuple[int, int] = (4, 18),
    edges: tuple[int, int] = (1, 4),
    strings: tuple[int, int] = (10, 20),
    string_length: tuple[int, int] = (1, 50),
) -> Samples:
    """For each sample an automaton of its own, and strings that it accepts, with a separator between them.

    The numbers of states, of letters in the alphabet, of edges from a state and of strings, and the lengths of strings,
    are drawn from the given ranges, both ends included. Letters are tokens [0, V - 2); the separator is V - 2 and the
    padding V - 1. The edges of a state have different letters and lead to any states. A string starts in the first
    state and takes each of a state's edges with the same probability. Every position before a letter asks for it, and
    each letter that the automaton allows there is right. No two samples have the same automaton, whatever the numbers
    of its states.

    Source: In-Context Language Learning: Architectures and Algorithms (Akyürek et al., 2024), section 3.
    """
    most = vocab_size - 2
    if not 1 <= letters[0] <= letters[1] <= most <= MOST_LETTERS:
        raise ValueError(f"letters={list(letters)} must lie in 1 ... {min(most, MOST_LETTERS)}")
    targets = _automata(random, samples, states, letters, edges, most)
    length = random.integers(string_length[0], string_length[1], (samples, strings[1]), endpoint=True)
    count = random.integers(strings[0], strings[1], samples, endpoint=True)
    ends = (length + 1).cumsum(axis=1) - 1  # the position of the separator after each string
    last = ends[np.arange(samples), count - 1]
    width = strings[1] * (string_length[1] + 1)
    separators = np.zeros((samples, width), dtype=bool)
    np.put_along_axis(separators, ends, True, axis=1)

    tokens = np.full((samples, width), vocab_size - 1)
    allowed = np.zeros((samples, width), dtype=np.int64)
    rows, state = np.arange(samples), np.zeros(samples, dtype=np.int64)
    bits = (targets >= 0) @ (1 << np.arange(most))  # [N, S], the letters that a state allows
    score = random.random((samples, width), dtype=np.float32)
    for place in range(width):
        edge = targets[rows, state] >= 0
        letter = _nth(edge, (score[:, place] * edge.sum(axis=1)).astype(np.int64))
        separator = separators[:, place]
        tokens[:, place] = np.where(separator, vocab_size - 2, letter)
        allowed[:, place] = np.where(separator, 0, bits[rows, state])
        state = np.where(separator, 0, targets[rows, state, letter])
    inside = np.arange(width) < last[:, None]
    tokens[~inside] = vocab_size - 1
    letter_follows = np.zeros_like(inside)
    letter_follows[:, :-1] = inside[:, 1:] & ~separators[:, 1:]
    following = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    labels = np.where(letter_follows, following, IGNORED)
    allowed = np.where(letter_follows, np.concatenate([allowed[:, 1:], allowed[:, :1]], axis=1), 0)
    return Samples(tokens, labels, allowed, _canonical(targets))


def _automata(
    random: np.random.Generator,
    samples: int,
    states: tuple[int, int],
    letters: tuple[int, int],
    edges: tuple[int, int],
    most: int,
) -> Integers:
    """Draw transitions `[N, S, most]`: the state to which a letter leads, or -1 without such an edge."""
    size = random.integers(states[0], states[1], samples, endpoint=True)
    alphabet = random.integers(letters[0], letters[1], samples, endpoint=True)
    rank = random.random((samples, most)).argsort(axis=1).argsort(axis=1)
    usable = rank < alphabet[:, None]
    shape = (samples, states[1], most)
    degree = np.minimum(random.integers(edges[0], edges[1], shape[:2], endpoint=True), alphabet[:, None])
    order = np.where(usable[:, None], random.random(shape), 2.0).argsort(axis=2).argsort(axis=2)
    to = (random.random(shape) * size[:, None, None]).astype(np.int64)
    exists = (order < degree[..., None]) & (np.arange(states[1]) < size[:, None])[..., None]
    return np.where(exists, to, -1)


def _nth(marks: np.ndarray, index: Integers) -> Integers:
    """The column of the mark number `index` in each row."""
    return ((marks.cumsum(axis=1) == index[:, None] + 1) & marks).argmax(axis=1)


def _canonical(targets: Integers) -> Integers:
    """Number the states by their first visit, breadth first and letter by letter; unreachable states are dropped.

    Two automata that differ only in the numbers of their states become equal.
    """
    samples, states, letters = targets.shape
    rows = np.arange(samples)
    number = np.full((samples, states + 1), -1)  # the number of each old state; the last column is for missing edges
    number[:, 0] = 0
    found = np.ones(samples, dtype=np.int64)
    old = np.full((samples, states), states)  # the old state of each number
    old[:, 0] = 0
    padded = np.concatenate([targets, np.full((samples, 1, letters), -1)], axis=1)
    for index in range(states):
        for letter in range(letters):
            to = padded[rows, old[:, index], letter]
            fresh = np.flatnonzero((to >= 0) & (number[rows, to] < 0))
            number[fresh, to[fresh]] = found[fresh]
            old[fresh, found[fresh]] = to[fresh]
            found[fresh] += 1
    ordered = padded[rows[:, None], old]  # [N, S, letters] in the new order, with old targets
    return np.where(ordered >= 0, number[rows[:, None, None], ordered], -1)
