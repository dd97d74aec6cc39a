"""The size of a batch in the unit of its task: images, sequences, documents or tokens."""

from __future__ import annotations

from typing import Any


def count_units(batch: Any) -> int:
    """The units in a batch of this process.

    A batch (inputs, targets), or its inputs, may have the whole number `units`: for packed rows of documents, the
    number of real tokens. Otherwise each row, of the first dimension of the inputs, is a unit.
    """
    for told in (batch, batch[0]):
        if (units := getattr(told, "units", None)) is not None:
            return int(units)
    return len(batch[0])


def count_tokens(batch: Any) -> int | None:
    """The tokens in a batch of this process whose units are documents: its inputs have the whole number `token_count`.

    None for other batches.
    """
    return getattr(batch[0], "token_count", None)
