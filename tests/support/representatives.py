"""Some mixers in place of all, for tests that take seconds for each."""

from __future__ import annotations

from longseq import mixers

# One mixer of each kind of code: softmax attention, delta rules with and without gates, slots, long convolutions, the
# orthogonal recurrence, scans along channels, linear attention, and least squares.
REPRESENTATIVES = ("attention", "deltanet", "gsa", "hyena", "lattice", "longhorn", "mamba2", "rwkv7", "vla")


def cover_operations() -> list[str]:
    """Mixers that have every operation between them, and those without an operation."""
    covered: set[str] = set()
    chosen = []
    for name in sorted(mixers.mixer_names(), key=lambda name: -len(mixers.get(name).operations)):
        operations = set(mixers.get(name).operations)
        if not operations or operations - covered:
            chosen.append(name)
            covered |= operations
    return chosen
