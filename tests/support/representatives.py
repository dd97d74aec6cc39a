"""Some mixers in place of all, for tests that take seconds for each."""

from __future__ import annotations

from longseq import mixers


def cover_operations() -> list[str]:
    """Mixers that have every operation between them, and all that have none."""
    covered: set[str] = set()
    chosen = []
    for name in mixers.mixer_names():
        operations = set(mixers.get(name).operations)
        if not operations or operations - covered:
            chosen.append(name)
            covered |= operations
    return chosen
