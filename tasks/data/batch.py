"""The batches that a data set gives to its loader."""

from __future__ import annotations

from typing import Any, NamedTuple


class Failure(NamedTuple):
    """A sample that could not be read, and the reason; `stops` the run where its label is wrong."""

    path: str
    reason: str
    stops: bool = False


class Batch(NamedTuple):
    """A whole batch: the model's inputs `[B, ...]`, the targets, and the samples that were skipped.

    A loader reports the failures and yields (inputs, targets).
    """

    inputs: Any
    targets: Any
    failures: list[Failure]
