"""Multi-query associative recall in zoology's form."""

from __future__ import annotations

import numpy as np

from longseq.tasks.data.generators import IGNORED, Samples, distinct

FILLERS = ("zero", "random")


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
    """Key-value pairs k1 v1 ... kN vN, then each key once more, at which its value is asked.

    Keys are different tokens of [1, V/2), values are different tokens of [V/2, V). The second occurrences are at even
    positions after the pairs, at distances g drawn without replacement with p(g) ~ (g + 1)^(power - 1): most are near.
    Between them are zeros, or random tokens of the whole vocabulary with `filler="random"`.

    Source: Zoology (Arora et al., 2023), section 4 and appendix E.
    """
    if filler not in FILLERS:
        raise ValueError(f"filler={filler!r} is not one of {', '.join(FILLERS)}")
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
