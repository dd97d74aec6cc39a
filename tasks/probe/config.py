"""The configuration keys of probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from longseq.tasks.training.command import refuse_inert
from longseq.tasks.training.keys import TaskKeys
from longseq.tasks.training.options import Length, Range, read
from longseq.tasks.training.token_keys import TokenModelKeys

SPLITS = ("train", "validation", "test")

Slices = Annotated[list[Mapping[str, Any]], Length(1)]


@dataclass(frozen=True, kw_only=True)
class ProbeDataKeys:
    """The keys of `data`; `ProbeDataModule` documents them."""

    name: str
    generator: str
    options: Mapping[str, Any]
    train: Slices
    validation: Slices
    test: Slices
    eval_batch_size: Annotated[int | None, Range(1)] = None
    draw_seed: int = 0
    cache: str | None = None


@dataclass(frozen=True)
class ProbeKeys(TaskKeys):
    """The keys of probes."""

    data: type = ProbeDataKeys

    def check(self, config: Mapping[str, Any]) -> None:
        read(TokenModelKeys, config["model"], "model")
        refuse_inert("model", config["model"], TokenModelKeys.inert_with)
        if config["recipe"].get("model"):
            raise ValueError("recipe.model is read by no part of task=probe: leave it out with ~recipe.model")
