"""The lengths of a run, of its warm-up and of the interval between validations: in epochs, updates or tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

UNITS = ("epochs", "updates", "tokens")
WARMUPS = tuple(f"warmup_{unit}" for unit in UNITS)

# The part of a run for its warm-up, if the recipe's warm-up is longer than the run.
SHORTENED = 0.1


class Epoch(NamedTuple):
    """The updates in an epoch of the data, and the tokens of an update (None for data without tokens).

    Of a loader without a length nobody knows the first before it is read: `counted` is False, and `updates` are those
    of the whole run, which reads the data as often as it takes.
    """

    updates: int
    tokens_per_update: float | None = None
    counted: bool = True


def count_epoch(trainer: Any, data: Any) -> Epoch | None:
    """The updates of an epoch of a data module in a run of Lightning's Trainer, and the tokens of one.

    None for data that does not count its batches.
    """
    batches = getattr(data, "batches_per_epoch", None)
    if batches is None:
        return None
    parts, tokens, limit = trainer.accumulate_grad_batches, data.tokens_per_epoch, trainer.limit_train_batches
    per_update = None if tokens is None else tokens / max(1, math.ceil(batches / parts))
    return Epoch(_count_updates(batches, limit, parts), per_update)


def refuse_other_epoch(saved: Mapping[str, Any], trainer: Any, data: Any) -> None:
    """ValueError where a resumed run would have another number of updates in an epoch: a limit counts batches, of which
    an update may have had another number.

    `saved` are the keys of `trainer` in the run of the checkpoint. Data that does not count its batches is not judged.
    """
    then, now = saved.get("accumulate_grad_batches", 1), trainer.accumulate_grad_batches
    batches = None if then == now else getattr(data, "batches_per_epoch", None)
    if batches is None:
        return
    limit = trainer.limit_train_batches
    before = _count_updates(batches // now * then, saved.get("limit_train_batches"), then)
    after = _count_updates(batches, limit, now)
    if before != after:
        raise ValueError(
            f"resume: an epoch had {before} updates, and has {after} with trainer.limit_train_batches={limit}, which "
            f"counts batches: an update has {now} in place of {then}; give trainer.limit_train_batches={before * now}"
        )


def _count_updates(batches: int, limit: float | None, parts: int) -> int:
    """The updates, of `parts` batches each, of an epoch under Lightning's limit: a number of batches, or a part."""
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    return max(1, math.ceil(batches / parts))


@dataclass(frozen=True)
class Span:
    """A part of a run: a number of one of UNITS, and the key that gave it."""

    count: float
    unit: str
    key: str

    def in_updates(self, epoch: Epoch) -> float:
        """The span in updates. ValueError for tokens if the data has none."""
        if self.unit == "epochs":
            return self.count * epoch.updates
        if self.unit == "updates":
            return self.count
        if epoch.tokens_per_update is None:
            raise ValueError(f"{self.key}={self.count:g}: this data has no tokens to count")
        return self.count / epoch.tokens_per_update

    def in_epochs(self, epoch: Epoch) -> float:
        """The span in epochs. ValueError as for `in_updates`."""
        return self.count if self.unit == "epochs" else self.in_updates(epoch) / epoch.updates


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The length of a run (one of `epochs`, `updates`, `tokens`), of its warm-up, and of the interval between
    validations.

    At most one of the three keys of the warm-up is given, and of those of the validation. Without any, there is no
    warm-up, and a validation follows each epoch. Every run ends with a validation. An update trains on an effective
    batch; tokens are those of all devices.
    """

    epochs: int | None = None
    updates: int | None = None
    tokens: float | None = None
    warmup_epochs: float | None = None
    warmup_updates: int | None = None
    warmup_tokens: float | None = None
    validate_every_epochs: int | None = None
    validate_every_updates: int | None = None
    validate_every_tokens: float | None = None

    def __post_init__(self) -> None:
        for prefix in ("", "warmup_", "validate_every_"):
            self._find(prefix)
        if self._find("") is None:
            raise ValueError(
                "recipe.epochs, recipe.updates and recipe.tokens are null: give one, the length of the run"
            )

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> RunLength:
        """The lengths in a recipe's keys. ValueError for two of one kind, or none of the run."""
        warmup = {name: recipe["schedule"].get(name) for name in WARMUPS}
        own = {field.name: recipe.get(field.name) for field in fields(cls) if field.name not in WARMUPS}
        return cls(**own, **warmup)

    @property
    def run(self) -> Span:
        """The whole run."""
        span = self._find("")
        assert span is not None
        return span

    @property
    def warmup(self) -> Span | None:
        return self._find("warmup_")

    @property
    def validation(self) -> Span | None:
        """The interval between validations; None means an epoch."""
        return self._find("validate_every_")

    def count_updates(self, epoch: Epoch) -> int:
        """The updates of the run."""
        return max(1, math.ceil(self.run.in_updates(epoch)))

    def count_warmup_epochs(self, epoch: Epoch) -> tuple[float, str | None]:
        """The warm-up in epochs, and a message if it is shortened because it is not shorter than the run."""
        span, total = self.warmup, self.count_updates(epoch)
        if span is None:
            return 0.0, None
        if span.in_updates(epoch) < total:
            return span.in_epochs(epoch), None
        updates = int(SHORTENED * total)
        return updates / epoch.updates, f"{self._outlasted(span)}: the warm-up takes {updates} of its {total} updates"

    def count_validation_epochs(self, epochs: int) -> tuple[int, str | None]:
        """The epochs from one validation to the next, in a run of so many, and a message if they are shortened to it.

        For intervals in epochs.
        """
        span = self.validation
        if span is None or span.count <= epochs:
            return int(span.count) if span else 1, None
        return epochs, f"{span.key}={span.count:g} is longer than the run: it is validated once, at its end"

    def check_units(self, epoch: Epoch) -> None:
        """Raise ValueError, in one line, for lengths in tokens if the data has none."""
        for span in (self.run, self.warmup, self.validation):
            if span is not None:
                span.in_updates(epoch)

    def _outlasted(self, warmup: Span) -> str:
        return f"{warmup.key}={warmup.count:g} is no shorter than the run ({self.run.key}={self.run.count:g})"

    def _find(self, prefix: str) -> Span | None:
        place = "recipe.schedule." if prefix == "warmup_" else "recipe."
        given = {f"{prefix}{unit}": getattr(self, f"{prefix}{unit}") for unit in UNITS}
        spans = [
            Span(value, name.removeprefix(prefix), place + name) for name, value in given.items() if value is not None
        ]
        if len(spans) > 1:
            told = " and ".join(f"{span.key}={span.count:g}" for span in spans)
            raise ValueError(f"{told}: give only one")
        return spans[0] if spans else None
