"""How much a batch holds, in the unit of its task: images, sequences, tokens."""

from __future__ import annotations

from typing import Any


def count_units(batch: Any) -> int:
    """The units in a batch of this process.

    A batch (inputs, targets), or its inputs, tells them by the attribute `units`, a whole number: a packed row of
    documents holds so many real tokens. Where neither has it each row is a unit: the first dimension of the inputs.
    """
    for told in (batch, batch[0]):
        if (units := getattr(told, "units", None)) is not None:
            return int(units)
    return len(batch[0])
