"""The keys of a training, as `longseq train` and the commands that begin with its configuration read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from longseq.tasks.training.command import CommandKeys
from longseq.tasks.training.options import OneOf, Range


def compile_modes() -> list[str]:
    """The modes of `torch.compile`."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())


@dataclass(frozen=True, kw_only=True)
class TrainKeys(CommandKeys):
    """The keys of `longseq train`: its own, and the configuration groups; conf/train.yaml says what they mean."""

    task: Mapping[str, Any]
    data: Mapping[str, Any]
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    mixer: Mapping[str, Any]
    scale: Mapping[str, Any]
    trainer: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    logger: Mapping[str, Any] | None
    seed: Annotated[int, Range(0, 2**32 - 1)]
    init: str | None
    resume: bool | str
    optimized_metric: str | None
    compile: Annotated[str | None, OneOf(compile_modes)]
    matmul_precision: Literal["highest", "high", "medium"]
    output: str | None
