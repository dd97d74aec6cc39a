"""Facts about a model for `longseq describe`: parameters, FLOPs, states, and the kernels that would run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from longseq import mixers
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.linear_text import LinearTextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.channel_mixing import ChannelMixing
from longseq.blocks.positions import Layout
from longseq.kernels.dispatch import Call, explain_call, record_calls
from longseq.kernels.packing import Packing
from longseq.mixers.attention import SoftmaxAttention
from longseq.mixers.cards import find_growth
from longseq.parameters import count_parameters
from longseq.state import state_size, state_tensors
from longseq.timm_models import model_name

__all__ = ["describe_model"]

# The part of a model to which a parameter belongs, by a piece of its name; the first match counts.
PARTS = (
    ("mixers", (".mixer.", ".attn.")),
    ("mlp", (".mlp.",)),
    ("embedding", ("patch_embed", "pos_embed", "cls_token", "reg_token", "stem.", "embedding.", "positions.")),
    ("norms", ("norm",)),
)


def describe_model(
    model: Any, data: Mapping[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Facts about a model of images, tokens or documents, as dictionaries, lists and numbers.

    FLOPs count a forward pass over one image or sequence, with two for a multiply-add. State sizes count the numbers
    kept for one sequence.

    Args:
        data: what a checkpoint knows of its data: `img_size` and `in_chans`, or the tokens of a sequence as `window`
            (text) or `longest` (probes).
        device: the device for which backends are chosen.
        dtype: the type in which packed attention would be computed.
    """
    is_text = isinstance(model, TokenBackbone | TextClassifier | LinearTextClassifier)
    body = model.body if isinstance(model, TextClassifier) else model
    facts: dict[str, Any] = {
        "model": model_name(model),
        "mixer": getattr(body, "mixer_name", None),
        "direction": getattr(body, "direction", None),
    }
    if is_text:
        tokens = data.get("window", data.get("longest"))
        flops = {"forward": model.flops(tokens), "source": "analytic"}
        words = body.inverse_frequency if isinstance(body, LinearTextClassifier) else None
        facts["vocabulary"] = body.vocab_size if words is None else len(words)
    else:
        size = data["img_size"]
        height, width = (size, size) if isinstance(size, int) else size
        tokens = _count_tokens(model, height, width)
        flops = _count_flops(model, data["in_chans"], height, width)
        facts["images"] = [data["in_chans"], height, width]
    if not isinstance(model, TokenBackbone):
        facts["classes"] = getattr(model, "num_classes", data.get("num_classes"))
    if isinstance(model, TextClassifier):
        facts["pooling"] = model.pooling.kind
    return {
        **facts,
        "tokens": tokens,
        "parameters": _count_parts(model),
        "weight_decay": _count_decayed(model),
        "flops": flops,
        "state": _describe_states(model),
        "operations": _judge_operations(model, device, tokens, dtype),
        "device": device,
    }


def _count_tokens(model: nn.Module, height: int, width: int) -> int | None:
    """The length of the sequence that the blocks read; None for models without sequences."""
    grid = getattr(getattr(model, "patch_embed", None), "dynamic_feat_size", None)
    if grid is None:
        return None
    rows, columns = grid((height, width))
    prefix: Any = getattr(model, "num_prefix_tokens", 0)
    return rows * columns + prefix


def _count_parts(model: nn.Module) -> dict[str, Any]:
    classifier: Any = getattr(model, "get_classifier", nn.Identity)()
    head = {id(parameter) for parameter in classifier.parameters()}
    parts = dict.fromkeys((*dict(PARTS), "head", "other"), 0)
    for name, parameter in model.named_parameters():
        parts["head" if id(parameter) in head else _part_of(name)] += parameter.numel()
    return {
        "total": count_parameters(model),
        "trainable": count_parameters(model, trainable=True),
        "parts": {name: count for name, count in parts.items() if count},
    }


def _part_of(name: str) -> str:
    return next((part for part, pieces in PARTS if any(piece in name for piece in pieces)), "other")


def _count_decayed(model: nn.Module) -> dict[str, int]:
    """The numbers of parameters with and without weight decay: vectors, and those that the model names, have none."""
    exempt: Any = getattr(model, "no_weight_decay", set)()
    counts = {"with": 0, "without": 0}
    for group in param_groups_weight_decay(model, weight_decay=1.0, no_weight_decay_list=exempt):
        counts["with" if group["weight_decay"] else "without"] += sum(p.numel() for p in group["params"])
    return counts


def _count_flops(model: nn.Module, channels: int, height: int, width: int) -> dict[str, Any]:
    """The model's own count; for other models of timm, the matrix products that torch counts on the meta device."""
    analytic: Any = getattr(model, "flops", None)
    if analytic is not None:
        return {"forward": analytic((height, width)), "source": "analytic"}
    empty = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        empty(torch.empty(1, channels, height, width, device="meta"))
    return {"forward": counter.get_total_flops(), "source": "counted by torch"}


def _describe_states(model: nn.Module) -> list[dict[str, Any]]:
    """For each mixing layer and MLP with a state: its readings, and the numbers that they keep for one sequence.

    `growth` counts the numbers that each token adds.
    """
    states = []
    for name, reading in mixers.named_readings(model):
        mixer = reading.readers[0]
        if mixer.supports_noncausal and not getattr(mixer, "causal", False):
            continue  # every token sees all
        with torch.no_grad():
            state, growth = mixer.initial_state(1), find_growth(copy.deepcopy(mixer).to("meta"))
        states.append(
            {
                "layer": name,
                "readings": len(reading.orders),
                "numbers": len(reading.orders) * state_size(state),
                "growth": len(reading.orders) * growth,
                "tensors": {field: list(tensor.shape[1:]) for field, tensor in state_tensors(state)},
            }
        )
    for name, part in model.named_modules():
        if isinstance(part, ChannelMixing):
            shift = part.initial_state(1)
            tensors = {"shift": list(shift.shape[1:])}
            states.append({"layer": name, "readings": 1, "numbers": shift.numel(), "growth": 0, "tensors": tensors})
    return states


def _judge_operations(model: nn.Module, device: str, tokens: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """For each operation that the mixing layers call: the backend that runs, and the reasons against the others.

    Layers that call one operation with other arguments may have other backends; then some reasons hold only for some
    layers.
    """
    judged: dict[str, Any] = {}
    for op, requested, call in _find_calls(model, dtype):
        sizes = call.sizes if tokens is None or "T" not in call.sizes else {**call.sizes, "T": tokens}
        reasons = explain_call(op, dataclasses.replace(call, device=torch.device(device), sizes=sizes))
        able = [backend for backend, against in reasons.items() if not against and requested in ("auto", backend)]
        found = judged.setdefault(op, {"requested": requested, "runs": [], "backends": {name: [] for name in reasons}})
        found["runs"] = list(dict.fromkeys([*found["runs"], *able[:1]]))
        for name, against in reasons.items():
            found["backends"][name] = list(dict.fromkeys([*found["backends"][name], *against]))
    return dict(sorted(judged.items()))


def _find_calls(model: nn.Module, dtype: torch.dtype) -> list[tuple[str, str, Call]]:
    """The calls of operations in a pass through each mixing layer on the meta device, over a few tokens.

    Softmax attention over packed rows is an operation of ours, over other rows a function of torch.
    """
    is_text = isinstance(model, TokenBackbone | TextClassifier)
    with record_calls() as calls, torch.no_grad():
        for _, reading in mixers.named_readings(model):
            empty = copy.deepcopy(reading).to("meta").eval()
            x = torch.empty(1, 4, empty.readers[0].d_model, device="meta")
            empty(x, layout=None if is_text else Layout(2, 2, None), output_final_state=False)
            if is_text and any(isinstance(reader, SoftmaxAttention) for reader in empty.readers):
                packing = Packing(torch.tensor([0, 4]), device="meta")
                empty.to(dtype)(x.to(dtype), cu_seqlens=packing, output_final_state=False)
    return calls
