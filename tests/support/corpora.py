"""Small corpora of artificial documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longseq.tasks.text.store import Corpus

SEPARATOR = 0


def make_corpus(lengths: Sequence[int], *, first: int = 1, prompts: Sequence[int] | None = None) -> Corpus:
    """Documents of `lengths` tokens, the separator included, whose other tokens are all different; two bytes each."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens[offsets[:-1]] = SEPARATOR
    trained = np.array(lengths) - (0 if prompts is None else np.array(prompts))
    return Corpus(tokens, offsets, 2 * trained, None if prompts is None else np.array(prompts))
