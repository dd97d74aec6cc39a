"""Copying: a whole sequence, or the tokens among blanks."""

from __future__ import annotations

import numpy as np

from longseq.tasks.data.generators import IGNORED, Samples, next_token_labels


def copy(random: np.random.Generator, samples: int, *, vocab_size: int = 128, tokens: int = 64) -> Samples:
    """Random tokens, a separator (the last of the vocabulary), and the tokens again, asked from the separator on.

    Of T tokens, T/2 are copied; the last of them is asked but not shown.

    Source: Variational Linear Attention, section 5.2.
    """
    half = tokens // 2
    original = random.integers(0, vocab_size - 1, (samples, half))
    separator = np.full((samples, 1), vocab_size - 1)
    whole = np.concatenate([original, separator, original], axis=1)
    labelled = np.arange(tokens + 1) >= half
    return Samples(whole[:, :-1], next_token_labels(whole, labelled[None])[:, :-1])


def selective_copying(
    random: np.random.Generator, samples: int, *, vocab_size: int = 16, tokens: int = 256, copied: int = 16
) -> Samples:
    """Tokens among blanks, a copy sign, then blanks at which the tokens are asked in their order.

    The tokens are at random positions among the first `tokens - copied - 1`, all choices equally likely. Blank and copy
    sign are the last two tokens of the vocabulary.

    Source: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024), section 3.1.
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
