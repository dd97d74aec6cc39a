"""What a data set hands to its loader."""

from __future__ import annotations

from typing import Any, NamedTuple


class Failure(NamedTuple):
    """A sample that could not be read, and why."""

    path: str
    reason: str


class Batch(NamedTuple):
    """A whole batch: what the model reads `[B, ...]`, what it is measured by, and the samples that were skipped.

    A loader reports the failures and yields (inputs, targets).
    """

    inputs: Any
    targets: Any
    failures: list[Failure]
