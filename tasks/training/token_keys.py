"""The keys of `model` of the token models that several tasks train."""

from __future__ import annotations

from typing import Literal

from longseq.tasks.config import Count, Keys, Positive, Share, key


class BodyKeys(Keys):
    """The keys of `model` for every model with the body of a token model; see `TokenBackbone`."""

    label: str = key(..., "the name in tables")
    d_model: Count | None = key(None, "the width")
    depth: Count | None = key(None, "the number of blocks")
    direction: Literal["forward", "bidirectional", "alternating"] | None = key(
        None, "forward, bidirectional (each layer reads both ways), alternating (every second one backwards)"
    )
    mlp: Literal["swiglu", "gelu", "rwkv", "none"] | None = key(None, "the MLP of a block")
    mlp_ratio: Positive | None = key(None, "its width over the model's; null: 8/3, or 7/2 of rwkv")
    mlp_bias: bool | None = key(None, "biases in the MLP")
    norm: Literal["rms", "layer"] | None = key(None, "the norm")
    norm_eps: Positive | None = key(None, "what is added to the variance")
    norm_order: Literal["pre", "post"] | None = key(None, "norm what a layer reads (pre) or what it adds (post)")
    positions: Literal["none", "learned"] | None = key(None, "embeddings of positions")
    max_length: Count | None = key(None, "the number of learned positions; null: the longest sequence")
    dropout: Share | None = key(None, "of the embeddings")
    drop_path: Share | None = key(None, "stochastic depth")
    residual_in_float32: bool | None = key(None, "add the layers in float32")
    recompute: Literal["none", "mixer", "block"] | None = key(None, "what the backward pass computes again, for memory")
    backend: Literal["auto", "torch", "reference", "triton"] | None = key(None, "kernels of all mixers")


class TokenModelKeys(BodyKeys):
    """The keys of `model`, explained in `longseq.backbones.tokens.TokenBackbone`."""

    name: Literal["token"] = key("token", "the kind of model")
    tie_embeddings: bool | None = key(None, "the head is the embedding")
