"""What a model costs: parameters, operations and the numbers of its state. For `metrics.json` and `longseq compare`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from longseq import mixers
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.sharding import unsharded_class
from longseq.parameters import count_parameters
from longseq.state import state_size
from longseq.tasks import registry

CLOSE = 0.01  # how far the parameters of a model may be from those that are asked for
MULTIPLE = 8  # of the width of an MLP: half precision needs it to be fast


def count_without_embedding(model: nn.Module) -> int:
    """The parameters outside of tables of embeddings; a head that shares such a table has none."""
    tables = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))
    return count_parameters(model) - tables


def costs_of(model: Any, tokens: int | None) -> dict[str, int]:
    """The parameters, and of a model that reads sequences of `tokens`, the operations of a token and the state.

    FLOPs are of a forward pass, two for a multiply-add. The state counts the numbers after all tokens of a sequence.
    """
    costs = {"parameters": count_parameters(model)}
    if tokens is None or not isinstance(model, TokenBackbone | TextClassifier):
        return costs
    costs |= {"parameters_without_embedding": count_without_embedding(model)}
    costs |= {"flops_per_token": round(model.flops(tokens) / tokens), "state": 0}
    for _, reading in mixers.named_readings(model):
        own = reading.readers[0]
        with torch.device("meta"), torch.no_grad():
            mixer: Any = unsharded_class(own)(**own.arguments)  # a new one, because parameters may be shards
            if own.supports_noncausal and not mixer.causal:
                continue  # every token sees all
            state = mixer.initial_state(1)
            if own.growing_state:
                _, state = mixer(torch.empty(1, tokens, own.d_model))
        costs["state"] += len(reading.orders) * state_size(state)
    return costs


def match_parameters(config: Mapping[str, Any], wanted: float) -> float:
    """The `model.mlp_ratio` with which a model has `wanted` parameters without embeddings. ValueError if none has."""
    chosen, datamodule, _ = registry.open_data(config)

    def count(ratio: float) -> tuple[int, int]:
        as_wide = {**chosen, "model": {**chosen["model"], "mlp_ratio": ratio}}
        with torch.device("meta"):
            model: Any = registry.of(config).model.build(as_wide, datamodule.info)
        body = getattr(model, "body", model)
        return count_without_embedding(model), getattr(body, "d_model", None) or body.embed_dim

    (one, width), (two, _) = count(1.0), count(2.0)
    columns = width * (1 + (wanted - one) / max(two - one, 1))
    ratio = MULTIPLE * round(columns / MULTIPLE) / width
    found = count(ratio)[0] if ratio > 0 else one
    if abs(found - wanted) > CLOSE * wanted:
        raise ValueError(f"parameters={wanted:g}: the nearest width of the MLP gives {found}")
    return ratio
