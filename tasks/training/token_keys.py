"""The keys of `model` of the token models that several tasks train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from longseq.arguments import Inert
from longseq.tasks.training.options import Range

Probability = Annotated[float, Range(0, below=1)]


@dataclass(frozen=True, kw_only=True)
class BodyKeys:
    """The keys of `model` for every model with the body of a token model; see `TokenBackbone`."""

    # Options that have no effect beside others, which `refuse_inert` refuses.
    inert_with: ClassVar[Inert] = {
        "mlp_ratio": ({"mlp": ("none",)},),
        "mlp_bias": ({"mlp": ("none", "gelu")},),  # gelu always has biases
        "max_length": ({"positions": ("none",)},),
        "share_directions": ({"direction": ("forward", "alternating")},),
        "merge": ({"direction": ("forward", "alternating")},),
    }

    label: str
    d_model: Annotated[int | None, Range(1)] = None
    depth: Annotated[int | None, Range(1)] = None
    direction: Literal["forward", "bidirectional", "alternating"] | None = None
    mlp: Literal["swiglu", "gelu", "rwkv", "none"] | None = None
    mlp_ratio: Annotated[float | None, Range(above=0)] = None
    mlp_bias: bool | None = None
    norm: Literal["rms", "layer"] | None = None
    norm_eps: Annotated[float | None, Range(above=0)] = None
    norm_order: Literal["pre", "post"] | None = None
    positions: Literal["none", "learned"] | None = None
    max_length: Annotated[int | None, Range(1)] = None
    dropout: Probability | None = None
    drop_path: Probability | None = None
    residual_in_float32: bool | None = None
    recompute: Literal["none", "mixer", "block"] | None = None
    backend: Literal["auto", "torch", "reference", "triton"] | None = None


@dataclass(frozen=True, kw_only=True)
class TokenModelKeys(BodyKeys):
    """The keys of `model`, explained in `longseq.backbones.tokens.TokenBackbone`."""

    name: Literal["token"]
    tie_embeddings: bool | None = None
