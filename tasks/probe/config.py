"""The keys that probes read of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from longseq.tasks.probe.slices import check_slices
from longseq.tasks.training.keys import TaskKeys
from longseq.tasks.training.options import Length, Range, read

SPLITS = ("train", "validation", "test")

Slices = Annotated[list[Mapping[str, Any]], Length(1)]
Probability = Annotated[float, Range(0, below=1)]


@dataclass(frozen=True, kw_only=True)
class TokenModelKeys:
    """The keys of `model`; what they mean stands in `longseq.backbones.tokens.TokenBackbone`."""

    name: Literal["token"]
    label: str
    d_model: Annotated[int | None, Range(1)] = None
    depth: Annotated[int | None, Range(1)] = None
    direction: Literal["forward", "bidirectional", "alternating"] | None = None
    mlp: Literal["swiglu", "gelu", "none"] | None = None
    mlp_ratio: Annotated[float | None, Range(above=0)] = None
    norm: Literal["rms", "layer"] | None = None
    positions: Literal["none", "learned"] | None = None
    max_length: Annotated[int | None, Range(1)] = None
    tie_embeddings: bool | None = None
    dropout: Probability | None = None
    drop_path: Probability | None = None
    residual_in_float32: bool | None = None
    recompute: Literal["none", "mixer", "block"] | None = None
    backend: Literal["auto", "torch", "reference", "triton"] | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeDataKeys:
    """The keys of `data`; what they mean stands in `ProbeDataModule`."""

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
        if config["recipe"].get("model"):
            raise ValueError("recipe.model is read by no part of task=probe: leave it out with ~recipe.model")
        data = read(ProbeDataKeys, config["data"], "data")
        check_slices(data.generator, data.options, {name: getattr(data, name) for name in SPLITS})
