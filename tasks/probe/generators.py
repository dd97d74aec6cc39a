"""Generators of the probes: recall, copying, MAD's tasks, RegBench, state tracking. Each makes many samples at once.

A plug-in adds its own with `@register("name")` on a function (random, samples, *, options with defaults) -> Samples.

Source of MAD's tasks, from `selective_copying` to `compression`: Mechanistic Design and Scaling of Hybrid Architectures
(Poli et al., 2024), section 3.1 and appendix B.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, TypeVar

import numpy as np

from longseq.tasks.data.generators import IGNORED, Integers, Samples, distinct, draw, listops, next_token_labels

__all__ = ["GENERATORS", "IGNORED", "Samples", "draw", "generator_options", "preset", "register"]

Generator = TypeVar("Generator", bound=Callable[..., Samples])


def mqar(
    random: np.random.Generator,
    samples: int,
    *,
    vocab_size: int = 8192,
    tokens: int = 64,
    pairs: int = 4,
    power: float = 0.01,
    filler: str = "zero",
) -> Samples:
    """Key-value pairs k1 v1 ... kN vN, then each key once more, where its value is the answer.

    Keys are distinct tokens of [1, V/2), values distinct tokens of [V/2, V). The keys come again at even positions
    after the pairs, at distances g drawn without replacement with p(g) ~ (g + 1)^(power - 1): most are near. The rest
    is zeros, or with `filler="random"` random tokens of the whole vocabulary.

    Source: Zoology (Arora et al., 2023), section 4 and appendix E.
    """
    if filler not in ("zero", "random"):
        raise ValueError(f"filler={filler!r} is neither zero nor random")
    half, context = vocab_size // 2, 2 * pairs
    keys = distinct(random, samples, pairs, 1, half)
    values = distinct(random, samples, pairs, half, vocab_size)
    sequence = np.zeros((samples, tokens), dtype=np.int64)
    if filler == "random":
        sequence[:, context:] = random.integers(0, vocab_size, (samples, tokens - context))
    sequence[:, 0:context:2] = keys
    sequence[:, 1:context:2] = values
    # The positions with the largest log p + Gumbel noise are a draw without replacement (Gumbel-top-k).
    weight = (power - 1) * np.log(np.arange(1, (tokens - context) // 2 + 1))
    score = weight + random.gumbel(size=(samples, len(weight)))
    places = context + 2 * np.argsort(-score, axis=1)[:, :pairs]
    np.put_along_axis(sequence, places, keys, axis=1)
    labels = np.full_like(sequence, IGNORED)
    np.put_along_axis(labels, places, values, axis=1)
    return Samples(sequence, labels)


def mqar_vla(
    random: np.random.Generator,
    samples: int,
    *,
    vocab_size: int = 128,
    pairs: int = 8,
    tokens: int | None = None,
    keys: Sequence[int] | None = None,
) -> Samples:
    """Pairs k1 v1 ... kn vn, a separator (the last token of the vocabulary), then the keys in random order.

    The answer at each key after the separator is its value. Keys are distinct tokens of `keys = [low, high)`, by
    default all tokens but the separator; values are any tokens but the separator. `tokens` is 3n + 1 by default. With
    more, random tokens other than the sample's keys fill the space before the separator (not specified in the paper).

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
        taken = np.zeros((samples, separator), dtype=bool)
        np.put_along_axis(taken, key, True, axis=1)
        free = taken.argsort(axis=1, kind="stable")  # the tokens that are not keys come first
        chosen = random.integers(0, separator - pairs, (samples, length - shortest))
        sequence[:, 2 * pairs : -pairs - 1] = np.take_along_axis(free, chosen, axis=1)
    order = random.random((samples, pairs)).argsort(axis=1)
    sequence[:, -pairs:] = np.take_along_axis(key, order, axis=1)
    labels = np.full_like(sequence, IGNORED)
    labels[:, -pairs:] = np.take_along_axis(value, order, axis=1)
    return Samples(sequence, labels)


def copy(random: np.random.Generator, samples: int, *, vocab_size: int = 128, tokens: int = 64) -> Samples:
    """T/2 random tokens, a separator (the last of the vocabulary), and the tokens again.

    From the separator on, the answer at each position is the next token of the copy; the last one is not shown.

    Source: Variational Linear Attention, section 5.2.
    """
    half = tokens // 2
    original = random.integers(0, vocab_size - 1, (samples, half))
    separator = np.full((samples, 1), vocab_size - 1)
    whole = np.concatenate([original, separator, original], axis=1)
    labelled = np.arange(tokens + 1) >= half
    return Samples(whole[:, :-1], next_token_labels(whole, labelled[None])[:, :-1])


def state_tracking(random: np.random.Generator, samples: int, *, vocab_size: int = 120, tokens: int = 64) -> Samples:
    """Permutations of n things, `vocab_size` = n! in all; the answer at each is the product of all permutations so far.

    2 is parity (S2), 6 is S3, 24 is S4 and 120 is S5, which transitions with eigenvalues in [0, 1] cannot track.

    Source: The Illusion of State in State-Space Models (Merrill et al., 2024), section 5.
    """
    things = next((n for n in range(2, 7) if math.factorial(n) == vocab_size), None)
    if things is None:
        raise ValueError(f"vocab_size={vocab_size} is not 2, 6, 24, 120 or 720, the permutations of n things")
    elements = np.array(list(permutations(range(things))))  # [n!, n], in lexicographic order
    places = things ** np.arange(things)
    numbers = np.zeros(things**things, dtype=np.int64)
    numbers[elements @ places] = np.arange(vocab_size)
    sequence = random.integers(0, vocab_size, (samples, tokens))
    product, labels = np.broadcast_to(np.arange(things), (samples, things)), np.empty_like(sequence)
    for t in range(tokens):
        product = np.take_along_axis(elements[sequence[:, t]], product, axis=1)
        labels[:, t] = numbers[product @ places]
    return Samples(sequence, labels)


def selective_copying(
    random: np.random.Generator, samples: int, *, vocab_size: int = 16, tokens: int = 256, copied: int = 16
) -> Samples:
    """Tokens among blanks, a copy sign, then blanks whose answers are the tokens in order.

    Tokens are at random positions among the first `tokens - copied - 1`; blank and copy sign are the last two tokens.
    """
    context = tokens - copied - 1
    blank, sign = vocab_size - 2, vocab_size - 1
    original = random.integers(0, blank, (samples, copied))
    places = np.sort(random.random((samples, context)).argsort(axis=1)[:, :copied], axis=1)
    sequence = np.full((samples, tokens), blank)
    np.put_along_axis(sequence, places, original, axis=1)
    sequence[:, context] = sign
    labels = np.full_like(sequence, IGNORED)
    labels[:, context + 1 :] = original
    return Samples(sequence, labels)


def recall(
    random: np.random.Generator,
    samples: int,
    *,
    vocab_size: int = 16,
    tokens: int = 128,
    noise: float = 0.0,
    noise_vocab_size: int = 0,
    label_all: bool = False,
) -> Samples:
    """In-context recall, noisy with `noise` > 0: random keys, each followed by its value.

    The vocabulary without `noise_vocab_size` is half keys, half values; each sample maps keys to values anew. A pair is
    replaced by two noise tokens with probability `noise`. The last pair repeats a key that was shown. Questions are the
    values of keys that were shown before, or with `label_all` every next token, as in MAD's training.
    """
    words = vocab_size - noise_vocab_size
    size, pairs = words // 2, tokens // 2
    value_of = size + random.integers(0, words - size, (samples, size))
    keys = random.integers(0, size, (samples, pairs))
    noisy = random.random((samples, pairs)) < noise
    noisy[np.arange(samples), random.integers(0, pairs - 1, samples)] = False  # at least one pair is shown
    noisy[:, -1] = False
    keys[:, -1] = _any_of(random, np.where(noisy, size, keys)[:, :-1], size)
    sequence = np.empty((samples, pairs, 2), dtype=np.int64)
    sequence[..., 0], sequence[..., 1] = keys, np.take_along_axis(value_of, keys, axis=1)
    if noise > 0:
        sequence = np.where(noisy[..., None], words + random.integers(0, noise_vocab_size, sequence.shape), sequence)
    labelled = np.zeros(sequence.shape, dtype=bool)
    labelled[..., 0] = _shown_before(np.where(noisy, size, keys), size) & ~noisy
    flat = sequence.reshape(samples, tokens)
    return Samples(flat, next_token_labels(flat, None if label_all else labelled.reshape(samples, tokens)))


def fuzzy_recall(
    random: np.random.Generator,
    samples: int,
    *,
    vocab_size: int = 16,
    tokens: int = 128,
    key_size: int = 3,
    value_size: int = 3,
    shortest_key: int = 3,
    label_all: bool = False,
) -> Samples:
    """In-context recall with keys and values of several tokens; all tokens of a known key's value are questions.

    Keys have `shortest_key` to `key_size` tokens and values one to `value_size`, all sizes equally likely; the tokens
    of a key or value are distinct. MAD trains with keys of every size and tests with the longest. The last pair repeats
    a key that was shown. Padding, on the left, is the last token of the vocabulary. `label_all` is as for `recall`.
    """
    words = vocab_size - 1
    half = words // 2
    if tokens < 2 * (key_size + value_size):
        raise ValueError(f"tokens={tokens} has no room for two pairs of {key_size + value_size} tokens")
    keys, key_sizes = _motifs(np.arange(half), shortest_key, key_size)
    values, value_sizes = _motifs(np.arange(half, words), 1, value_size)
    value_of = _draw_motifs(random, value_sizes, (samples, len(keys)))
    most = tokens // (shortest_key + 1)
    drawn = _draw_motifs(random, key_sizes, (samples, most))

    lengths = key_sizes[drawn] + value_sizes[np.take_along_axis(value_of, drawn, axis=1)]
    room = tokens - key_size - value_size  # the last pair must fit, whatever its sizes
    fits = lengths.cumsum(axis=1) <= room
    probe = _any_of(random, np.where(fits, drawn, len(keys)), len(keys))
    count = fits.sum(axis=1)
    drawn = np.concatenate([drawn, drawn[:, :1]], axis=1)
    drawn[np.arange(samples), count] = probe
    used = np.arange(most + 1) <= count[:, None]

    value = np.take_along_axis(value_of, drawn, axis=1)
    known = _shown_before(np.where(used, drawn, len(keys)), len(keys)) & used
    pieces = np.concatenate([keys[drawn], values[value]], axis=2)  # [N, pairs, key_size + value_size], -1 where shorter
    labelled = np.zeros(pieces.shape, dtype=bool)
    labelled[..., key_size:] = known[..., None]
    pieces[~used] = -1
    filled = (pieces >= 0).reshape(samples, -1)
    at_the_end = filled.argsort(axis=1, kind="stable")[:, -tokens:]
    flat = np.where(filled, pieces.reshape(samples, -1), words)
    sequence = np.take_along_axis(flat, at_the_end, axis=1)
    asked = np.take_along_axis(filled & labelled.reshape(samples, -1), at_the_end, axis=1)
    # The label of a position is the next token.
    return Samples(sequence, next_token_labels(sequence, None if label_all else np.roll(asked, -1, axis=1)))


def memorization(
    random: np.random.Generator, samples: int, *, vocab_size: int = 256, tokens: int = 32, mapping_seed: int = 12345
) -> Samples:
    """Keys, each followed by a sign (the last token of the vocabulary) whose answer is the key's value.

    Values are never shown. The map from keys to values is one-to-one, and `mapping_seed` draws it for all samples.
    """
    size = (vocab_size - 1) // 2
    value_of = size + np.random.default_rng(mapping_seed).permutation(vocab_size - 1 - size)[:size]
    keys = random.integers(0, size, (samples, tokens // 2))
    sequence = np.full((samples, tokens), vocab_size - 1)
    sequence[:, 0::2] = keys
    labels = np.full_like(sequence, IGNORED)
    labels[:, 1::2] = value_of[keys]
    return Samples(sequence, labels)


def compression(random: np.random.Generator, samples: int, *, vocab_size: int = 16, tokens: int = 32) -> Samples:
    """Random tokens and a final sign (the last token of the vocabulary); the answer at each position is its own token.

    The model must rebuild the sequence from its feature at the sign (`longseq.backbones.autoencoder`).
    """
    sequence = random.integers(0, vocab_size - 1, (samples, tokens))
    sequence[:, -1] = vocab_size - 1
    return Samples(sequence, sequence.copy())


def _any_of(random: np.random.Generator, keys: Integers, size: int) -> Integers:
    """Draws one of the different keys [0, size) of each row uniformly: `[N]`; the key `size` stands for no key."""
    present = np.zeros((len(keys), size + 1), dtype=bool)
    np.put_along_axis(present, keys, True, axis=1)
    score = random.random((len(keys), size))
    return np.where(present[:, :size], score, -1.0).argmax(axis=1)


def _shown_before(keys: Integers, size: int) -> np.ndarray:
    """Marks the keys that occur earlier in their row; the key `size` stands for no key."""
    samples, count = keys.shape
    first = np.full((samples, size + 1), count)
    places = np.broadcast_to(np.arange(count), keys.shape)
    np.minimum.at(first, (np.arange(samples)[:, None], keys), places)
    return (places > np.take_along_axis(first, keys, axis=1)) & (keys < size)


def _motifs(words: Integers, shortest: int, longest: int) -> tuple[Integers, Integers]:
    """All permutations of `shortest` to `longest` distinct words, padded with -1, and their sizes."""
    listed = [motif for size in range(shortest, longest + 1) for motif in permutations(words.tolist(), size)]
    sizes = np.array([len(motif) for motif in listed])
    filled = np.full((len(listed), longest), -1)
    filled[np.arange(longest) < sizes[:, None]] = [word for motif in listed for word in motif]
    return filled, sizes


def _draw_motifs(random: np.random.Generator, sizes: Integers, shape: tuple[int, int]) -> Integers:
    """Draws indices of motifs: all sizes are equally likely, and so are all motifs of a size."""
    kinds, starts, counts = np.unique(sizes, return_index=True, return_counts=True)
    kind = random.integers(0, len(kinds), shape)
    return starts[kind] + (random.random(shape) * counts[kind]).astype(np.int64)


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
    """Strings of a random automaton, which the model has to infer; each sample has its own automaton.

    The numbers of states, letters, edges per state and strings, and the lengths of strings, are drawn from the given
    ranges, both ends included. Letters are tokens [0, V - 2); V - 2 separates strings and V - 1 is padding. The edges
    of a state have distinct letters and lead to any states. A string starts in the first state and takes each edge of a
    state with the same probability. Each position before a letter is a question, and every letter that the automaton
    allows there is right. No two samples have the same automaton up to the numbering of states.

    Source: In-Context Language Learning: Architectures and Algorithms (Akyürek et al., 2024), section 3.
    """
    most = vocab_size - 2
    if not 1 <= letters[0] <= letters[1] <= most <= 62:  # `allowed` has 62 bits
        raise ValueError(f"letters={list(letters)} must lie in 1 ... {min(most, 62)}")
    targets = _automata(random, samples, most, states, letters, edges)
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
        chosen = (score[:, place] * edge.sum(axis=1)).astype(np.int64)  # counts the edges of the state from 0
        letter = ((edge.cumsum(axis=1) == chosen[:, None] + 1) & edge).argmax(axis=1)
        separator = separators[:, place]
        tokens[:, place] = np.where(separator, vocab_size - 2, letter)
        allowed[:, place] = np.where(separator, 0, bits[rows, state])
        state = np.where(separator, 0, targets[rows, state, letter])
    inside = np.arange(width) < last[:, None]
    tokens[~inside] = vocab_size - 1
    letter_follows = np.roll(inside & ~separators, -1, axis=1)
    letter_follows[:, -1] = False
    allowed = np.where(letter_follows, np.roll(allowed, -1, axis=1), 0)
    return Samples(tokens, next_token_labels(tokens, letter_follows), allowed, _canonical(targets))


def _automata(random: np.random.Generator, samples: int, most: int, *ranges: tuple[int, int]) -> Integers:
    """Draws transitions `[N, S, most]`: the state to which a letter leads, or -1 without such an edge.

    `ranges` are of the numbers of states, of letters and of edges per state.
    """
    states, letters, edges = ranges
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


def _canonical(targets: Integers) -> Integers:
    """Renumbers the states in the order of a breadth-first search by letter; unreachable states are dropped.

    Two automata that differ only in the numbering of their states become equal.
    """
    samples, states, letters = targets.shape
    rows = np.arange(samples)
    number = np.full((samples, states + 1), -1)  # new numbers by old state; the last column is for missing edges
    number[:, 0] = 0
    found = np.ones(samples, dtype=np.int64)
    old = np.full((samples, states), states)  # old states by new number
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


_MAD = (compression, fuzzy_recall, memorization, recall, selective_copying)
_ALL = (copy, listops, mqar, mqar_vla, regbench, state_tracking, *_MAD)
GENERATORS: dict[str, Callable[..., Samples]] = {generator.__name__: generator for generator in _ALL}


def register(name: str) -> Callable[[Generator], Generator]:
    """Register a generator for `task=probe data=NAME`; its keyword-only arguments are `data.options`.

    All have defaults; one is `vocab_size`. `conf/data/NAME.yaml` overrides `preset(NAME)`. ValueError for a taken name.
    """

    def enter(generator: Generator) -> Generator:
        if name in GENERATORS:
            raise ValueError(f"there already is a generator {name!r}")
        GENERATORS[name] = generator
        return generator

    return enter


def preset(name: str) -> dict[str, Any]:
    """The config group `data` of a generator without a file: its defaults, and mqar's numbers of samples."""
    sizes = {"train": 10_000, "validation": 500, "test": 1_000}
    slices = {split: [{"samples": count}] for split, count in sizes.items()}
    own = {"name": name, "generator": name, "options": generator_options(name)}
    return {**own, **slices, "eval_batch_size": 250, "draw_seed": 0}


def generator_options(name: str) -> dict[str, Any]:
    """The options of a generator with their defaults."""
    parameters = inspect.signature(GENERATORS[name]).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
