"""Some mixers in place of all, for tests that take seconds for each."""

from __future__ import annotations

from collections import Counter

from longseq import mixers


def choose_mixers(count: int = 2) -> list[str]:
    """The first `count` mixers of those with the same operations, and all that have none."""
    met: Counter[tuple[str, ...]] = Counter()
    chosen = []
    for name in mixers.mixer_names():
        operations = tuple(sorted(mixers.get(name).operations))
        met[operations] += 1
        if not operations or met[operations] <= count:
            chosen.append(name)
    return chosen
