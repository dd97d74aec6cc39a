"""How much a batch holds, in the unit of its task: images, sequences, tokens."""

from __future__ import annotations

from typing import Any


def count_units(batch: Any) -> int:
    """The units in a batch of this process.

    A batch tells them itself by its attribute `units`, a whole number: a packed row of documents holds so many real
    tokens. Of a batch without it each row is a unit: the first dimension of its first element.
    """
    units = getattr(batch, "units", None)
    return len(batch[0]) if units is None else int(units)
