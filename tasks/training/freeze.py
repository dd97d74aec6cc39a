"""Frozen layers: parameters that training leaves as they are."""

from __future__ import annotations

from typing import Any

from timm.models._manipulate import group_with_matcher
from torch import nn

_HEAD = "?"  # no parameter has this name: it stands for those outside the numbered layers
_AVERAGE = "running_mean"  # a buffer of batch norms only


def freeze(model: nn.Module, part: int | str | None) -> None:
    """Exclude a part of a model's parameters from training, as `recipe.freeze` names it; None excludes nothing.

    A number N means the embeddings and the first N blocks, `embeddings` only the embeddings, `body` everything but the
    head and the pooling before it. The layers are those of the model's `group_matcher`, which timm's layer-wise
    learning rates follow, too. Frozen batch norms are in evaluation mode: they normalise by the statistics that they
    have, and these remain.

    Raises:
        ValueError: the model has fewer blocks, or nothing would be left to train.
    """
    if part is None:
        return
    described: Any = model
    averages = [name for name, _ in model.named_buffers() if name.endswith(f".{_AVERAGE}")]
    names = [*dict(model.named_parameters()), *averages, _HEAD]
    layer_of = group_with_matcher(((name, None) for name in names), described.group_matcher(coarse=False), reverse=True)
    blocks = layer_of[_HEAD] - 1
    last = {"embeddings": 0, "body": blocks}[part] if isinstance(part, str) else part
    if last > blocks:
        raise ValueError(f"recipe.freeze={part}: the model has {blocks} blocks")
    for name, parameter in model.named_parameters():
        if layer_of[name] <= last:
            parameter.requires_grad_(False)
    for name in averages:
        if layer_of[name] <= last:
            model.get_submodule(name.removesuffix(f".{_AVERAGE}")).eval()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"recipe.freeze={part} leaves nothing to train")
