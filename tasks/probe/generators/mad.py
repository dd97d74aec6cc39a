"""MAD's tasks, except copying.

Source: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024), section 3.1 and appendix B.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from longseq.tasks.data.generators import IGNORED, Integers, Samples, next_token_labels


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
    """In-context recall, noisy with `noise` > 0: keys and their values in random order, a value asked at a known key.

    The vocabulary without `noise_vocab_size` is one half keys, one half values; each sample has its own value for each
    key. A pair is replaced by two noise tokens with probability `noise`. The last pair repeats a key that was shown.
    With `label_all`, every next token is asked, as in MAD's training; otherwise only the values of keys that were shown
    before.
    """
    words = vocab_size - noise_vocab_size
    size, pairs = words // 2, tokens // 2
    value_of = size + random.integers(0, words - size, (samples, size))
    keys = random.integers(0, size, (samples, pairs))
    noisy = random.random((samples, pairs)) < noise
    noisy[np.arange(samples), random.integers(0, pairs - 1, samples)] = False  # at least one pair is shown
    noisy[:, -1] = False
    shown = _present(np.where(noisy, size, keys)[:, :-1], size)
    keys[:, -1] = _any_of(random, shown)
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
    """In-context recall whose keys and values are several tokens: all tokens of a value are asked at a known key.

    Keys have `shortest_key` to `key_size` tokens and values one to `value_size`, all sizes equally likely; the tokens
    of a key or value are different. MAD trains with keys of every size and tests with the longest. The last pair
    repeats a key that was shown. The sequence is padded on the left with the last token of the vocabulary.
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
    probe = _any_of(random, _present(np.where(fits, drawn, len(keys)), len(keys)))
    count = fits.sum(axis=1)
    drawn = np.concatenate([drawn, drawn[:, :1]], axis=1)
    drawn[np.arange(samples), count] = probe
    used = np.arange(most + 1) <= count[:, None]

    value = np.take_along_axis(value_of, drawn, axis=1)
    known = _shown_before(np.where(used, drawn, len(keys)), len(keys)) & used
    pieces = np.concatenate([keys[drawn], values[value]], axis=2)  # [N, pairs, key_size + value_size], -1 where shorter
    labelled = np.zeros(pieces.shape, dtype=bool)
    labelled[..., key_size:] = known[..., None]
    filled = (pieces >= 0) & used[..., None]
    sequence, labelled = _right_aligned(pieces, labelled, filled, tokens, padding=words)
    # The label of a position is the next token.
    following = np.concatenate([labelled[:, 1:], np.zeros((samples, 1), dtype=bool)], axis=1)
    return Samples(sequence, next_token_labels(sequence, None if label_all else following))


def memorization(
    random: np.random.Generator, samples: int, *, vocab_size: int = 256, tokens: int = 32, mapping_seed: int = 12345
) -> Samples:
    """Keys, each followed by a sign (the last token) at which its value is asked. No value is ever shown.

    The value of a key is the same in all samples, drawn once from `mapping_seed`; no two keys share a value.
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
    """Random tokens and a sign (the last token) after them; each position asks for its own token.

    The model must rebuild the sequence from its feature at the sign (`longseq.backbones.autoencoder`).
    """
    sequence = random.integers(0, vocab_size - 1, (samples, tokens))
    sequence[:, -1] = vocab_size - 1
    return Samples(sequence, sequence.copy())


def _present(keys: Integers, size: int) -> np.ndarray:
    """Which of the keys [0, size) occur in each row: `[N, size]`; the key `size` means none."""
    present = np.zeros((len(keys), size + 1), dtype=bool)
    np.put_along_axis(present, keys, True, axis=1)
    return present[:, :size]


def _any_of(random: np.random.Generator, present: np.ndarray) -> Integers:
    """One of the marked columns of each row, all equally likely: `[N]`."""
    return np.where(present, random.random(present.shape), -1.0).argmax(axis=1)


def _shown_before(keys: Integers, size: int) -> np.ndarray:
    """True if the key occurs earlier in its row; the key `size` means none."""
    samples, count = keys.shape
    first = np.full((samples, size + 1), count)
    places = np.broadcast_to(np.arange(count), keys.shape)
    np.minimum.at(first, (np.arange(samples)[:, None], keys), places)
    return (places > np.take_along_axis(first, keys, axis=1)) & (keys < size)


def _motifs(words: Integers, shortest: int, longest: int) -> tuple[Integers, Integers]:
    """Every order of `shortest` to `longest` different words, padded with -1, and their sizes."""
    listed = [motif for size in range(shortest, longest + 1) for motif in permutations(words.tolist(), size)]
    sizes = np.array([len(motif) for motif in listed])
    filled = np.full((len(listed), longest), -1)
    filled[np.arange(longest) < sizes[:, None]] = [word for motif in listed for word in motif]
    return filled, sizes


def _draw_motifs(random: np.random.Generator, sizes: Integers, shape: tuple[int, int]) -> Integers:
    """Draw motifs by index: each size is equally likely, and so is each motif of a size."""
    kinds, starts, counts = np.unique(sizes, return_index=True, return_counts=True)
    kind = random.integers(0, len(kinds), shape)
    return starts[kind] + (random.random(shape) * counts[kind]).astype(np.int64)


def _right_aligned(
    pieces: Integers, labelled: np.ndarray, filled: np.ndarray, tokens: int, *, padding: int
) -> tuple[Integers, np.ndarray]:
    """Concatenate the filled entries of `pieces [N, P, S]` at the right end of `[N, tokens]`."""
    samples = len(pieces)
    pieces, labelled, filled = (part.reshape(samples, -1) for part in (pieces, labelled, filled))
    place = tokens - filled.sum(axis=1, keepdims=True) + filled.cumsum(axis=1) - 1
    row = np.broadcast_to(np.arange(samples)[:, None], place.shape)
    sequence = np.full((samples, tokens), padding)
    marks = np.zeros((samples, tokens), dtype=bool)
    sequence[row[filled], place[filled]] = pieces[filled]
    marks[row[filled], place[filled]] = labelled[filled]
    return sequence, marks
