"""The keys of `longseq predict` that the inputs of every task read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from longseq.tasks.training.options import Range
from longseq.tasks.training.processes import refuse_many


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
