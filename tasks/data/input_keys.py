"""The keys of `longseq predict` that the inputs of every task read."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from longseq.tasks.training.options import Range
from longseq.tasks.training.processes import refuse_many

_log = logging.getLogger(__name__)


def tell_escapes(key: str, texts: Iterable[str]) -> None:
    r"""Warn, in one line, of a backslash and an n, r or t: a shell passes both on, and no line break or tab."""
    if any(mark in text for text in texts for mark in (r"\n", r"\r", r"\t")):
        _log.warning(
            "%s has a backslash and a letter, which stand for no line break or tab: bash and zsh write these in %s",
            key,
            r"""$'...', as in $'stop=["\n\n"]'""",
        )


@dataclass(frozen=True, kw_only=True)
class InputKeys:
    """The keys of `longseq predict` that inputs read; conf/predict.yaml documents them."""

    top_k: Annotated[int | None, Range(1)]
    batch_size: Annotated[int, Range(1)]
    num_workers: Annotated[int, Range(0)]
    column: str | None
    truncation: Literal["none"] | None
    segment: Annotated[int | None, Range(1)]
    saliency: str | None = None
    saliency_class: str | int | None = None

    def __post_init__(self) -> None:
        refuse_many(self.num_workers, "num_workers")
