"""The keys that probes read of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from longseq.tasks.training.keys import TaskKeys
from longseq.tasks.training.options import Range


@dataclass(frozen=True, kw_only=True)
class ProbeDataKeys:
    """The keys of `data`; what they mean stands in `ProbeDataModule`."""

    name: str
    generator: str
    options: Mapping[str, Any]
    train: Sequence[Mapping[str, Any]]
    validation: Sequence[Mapping[str, Any]]
    test: Sequence[Mapping[str, Any]]
    eval_batch_size: Annotated[int | None, Range(1)] = None
    draw_seed: int = 0
    cache: str | None = None


@dataclass(frozen=True)
class ProbeKeys(TaskKeys):
    """The keys of probes."""

    data: type = ProbeDataKeys

    def check(self, config: Mapping[str, Any]) -> None:
        if "generator" not in config["data"]:
            name = config["data"].get("name")
            raise ValueError(f"data={name} is no probe: task=probe takes data=mqar and others; see --help")
