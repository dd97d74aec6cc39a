"""Single layers of Kimi Linear, Qwen3-Next and Qwen3.5 as mixers of ours, and back, with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longseq import mixers
from longseq.backbones.likeness import INITIAL
from longseq.mixers import Mixer
from longseq.mixers.registry import name_of
from longseq.tools.hugging_face.families.family import SILU, Values

Parts = dict[str, tuple[int, ...]]

# Options that follow from the shapes of the weights.
SHOWN = ("head_dim", "expand_k", "expand_v")


@dataclass(frozen=True)
class Layer:
    """A kind of layer as transformers has it.

    Attributes:
        mixer: our name of it.
        options: the options of our mixer for a config.json.
        parts: the weights that make up each of ours, one below the other, and their shapes.
        rows: the order of ours among the rows of their projections; None if they have the same.
    """

    mixer: str
    options: Callable[[Values], dict[str, Any]]
    parts: Callable[[Any], dict[str, Parts]]
    rows: Callable[[Any], Tensor] | None = None


def _kimi_options(values: Values) -> dict[str, Any]:
    sizes = {
        "num_heads": values.get("linear_num_heads"),
        "head_dim": values.get("linear_head_dim"),
        "short_conv_kernel_size": values.get("linear_conv_kernel_dim"),
        **values.get("linear_attn_config", {}),  # of the published config.json
    }
    return {
        "num_heads": sizes["num_heads"],
        "expand_k": sizes["num_heads"] * sizes["head_dim"] / values["hidden_size"],
        "convolution_width": sizes["short_conv_kernel_size"],
    }


def _kimi_parts(mixer: Any) -> dict[str, Parts]:
    width, keys, heads, rank = mixer.d_model, mixer.key_width, mixer.num_heads, mixer.value_dim
    rows = {"q_proj": keys, "k_proj": keys, "v_proj": keys, "b_proj": heads, "forget_gate.f_a_proj": rank}
    return {
        "in_proj.weight": {f"{name}.weight": (count, width) for name, count in {**rows, "g_a_proj": rank}.items()},
        "convolution.weight": {"conv1d.weight": (3 * keys, 1, mixer.convolution.width)},
        "decay_proj.weight": {"forget_gate.f_b_proj.weight": (keys, rank)},
        "gate_proj.weight": {"g_b_proj.weight": (keys, rank)},
        "A_log": {"forget_gate.A_log": (1, 1, heads, 1)},
        "dt_bias": {"forget_gate.dt_bias": (keys,)},
        "norm.weight": {"o_norm.weight": (rank,)},
        "out_proj.weight": {"o_proj.weight": (width, keys)},
    }


def _qwen_options(values: Values) -> dict[str, Any]:
    heads, key_dim = values["linear_num_key_heads"], values["linear_key_head_dim"]
    return {
        "num_heads": heads,
        "num_value_heads": values["linear_num_value_heads"],
        "expand_k": heads * key_dim / values["hidden_size"],
        "expand_v": values["linear_value_head_dim"] / key_dim,
        "convolution_width": values["linear_conv_kernel_dim"],
    }


def _qwen_parts(mixer: Any, **rows: int) -> dict[str, Parts]:
    heads = (mixer.num_value_heads,)
    return {
        "in_proj.weight": {f"in_proj_{name}.weight": (count, mixer.d_model) for name, count in rows.items()},
        "convolution.weight": {"conv1d.weight": (mixer.mixed_width, 1, mixer.convolution.width)},
        "A_log": {"A_log": heads},
        "dt_bias": {"dt_bias": heads},
        "norm.weight": {"norm.weight": (mixer.value_dim,)},
        "out_proj.weight": {"out_proj.weight": (mixer.d_model, mixer.value_width)},
    }


def _qwen3_next_parts(mixer: Any) -> dict[str, Parts]:
    qkvz = 2 * (mixer.key_width + mixer.value_width)
    return _qwen_parts(mixer, qkvz=qkvz, ba=2 * mixer.num_value_heads)


def _qwen3_next_rows(mixer: Any) -> Tensor:
    """q, k, v, b, a and z; theirs are sorted by heads of keys first."""
    heads, times = mixer.num_heads, mixer.num_value_heads // mixer.num_heads
    rows = torch.arange(mixer.in_proj.out_features)
    qkvz, ba = rows.split([len(rows) - 2 * mixer.num_value_heads, 2 * mixer.num_value_heads])
    widths = [mixer.key_dim] * 2 + [times * mixer.value_dim] * 2
    q, k, v, z = qkvz.view(heads, -1).split(widths, dim=1)
    b, a = ba.view(heads, -1).split(times, dim=1)
    return torch.cat([part.flatten() for part in (q, k, v, b, a, z)])


def _qwen3_5_parts(mixer: Any) -> dict[str, Parts]:
    heads = mixer.num_value_heads
    return _qwen_parts(mixer, qkv=mixer.mixed_width, b=heads, a=heads, z=mixer.value_width)


_QWEN3_5 = Layer("gated_deltanet", _qwen_options, _qwen3_5_parts)
LAYERS = {
    "kimi_linear": Layer("kda", _kimi_options, _kimi_parts),
    "qwen3_next": Layer("gated_deltanet", _qwen_options, _qwen3_next_parts, _qwen3_next_rows),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}


def read_layer(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Mixer[Any]:
    """The mixer that computes what a recurrent layer of Kimi Linear (`kda`) or Qwen (`gated_deltanet`) does.

    Args:
        config: the config.json of the layer's model, or `model.config.to_dict()`.
        weights: `state_dict()` of the layer (`KimiLinearDeltaAttention`, `Qwen3NextGatedDeltaNet`, ...), or its
            weights from a file, without the prefix of the layer.

    Returns the mixer with copies of the weights, in their types and on their devices.

    Raises:
        ValueError: another kind of model, or weights that do not fit.
        KeyError: a weight is missing.
    """
    layer, mixer = _make(config)
    theirs = dict(weights)
    if "q_conv1d.weight" in theirs:  # Kimi Linear's files
        theirs["conv1d.weight"] = torch.cat([theirs.pop(f"{part}_conv1d.weight") for part in "qkv"])
        for name in ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias"):
            theirs[f"forget_gate.{name}"] = theirs.pop(name)
    ours = {}
    for name, parts in layer.parts(mixer).items():
        for part, shape in parts.items():
            if theirs[part].shape != shape:
                raise ValueError(f"{part} has the shape {list(theirs[part].shape)}, not {list(shape)}")
        rest = mixer.get_parameter(name).shape[1:]
        ours[name] = torch.cat([theirs.pop(part).reshape(-1, *rest) for part in parts])
    if theirs:
        raise ValueError(f"the layer has no place for the weight {min(theirs)}")
    if layer.rows is not None:
        ours["in_proj.weight"] = ours["in_proj.weight"][layer.rows(mixer)]
    if layer.mixer == "kda":
        ours["gate_proj.bias"] = torch.zeros_like(ours["gate_proj.weight"][:, 0])
    mixer.load_state_dict(ours, assign=True)
    return mixer


def write_layer(config: Mapping[str, Any], mixer: Mixer[Any]) -> dict[str, Tensor]:
    """The state dict of transformers' layer that computes what a mixer does; the arguments are those of `read_layer`.

    Raises:
        ValueError: no layer of such a model computes it. Kimi Linear's output gate, for example, has no bias.
    """
    layer, wanted = _make(config)
    kind, own = config["model_type"], name_of(type(mixer))
    if own != layer.mixer:
        raise ValueError(f"{kind} has layers of {layer.mixer}, not of {own}")
    for option, value in wanted.arguments.items():
        if option not in (*SHOWN, *INITIAL, "backend") and mixer.arguments[option] != value:
            raise ValueError(f"{kind} has no layer whose {option} is {mixer.arguments[option]}, only {value}")
    ours = mixer.state_dict()
    wanted.load_state_dict(ours, assign=True)  # torch's error for other shapes
    if layer.mixer == "kda" and ours["gate_proj.bias"].any():
        raise ValueError(f"{kind} has no place for gate_proj.bias, which is not zero")
    if layer.rows is not None:
        ours["in_proj.weight"] = ours["in_proj.weight"][layer.rows(mixer).argsort()]
    theirs: dict[str, Tensor] = {}
    for name, parts in layer.parts(mixer).items():
        rows = [math.prod(shape) // ours[name][0].numel() for shape in parts.values()]
        pieces = zip(parts.items(), ours[name].split(rows), strict=True)
        theirs |= {part: piece.reshape(shape).clone() for (part, shape), piece in pieces}
    return theirs


def _make(config: Mapping[str, Any]) -> tuple[Layer, Mixer[Any]]:
    """The kind of layer of a config.json, and our mixer without values."""
    layer = LAYERS.get(config["model_type"])
    if layer is None:
        raise ValueError(
            f"model_type={config['model_type']} is unknown; longseq converts layers of {', '.join(LAYERS)}"
        )
    if config["hidden_act"] not in SILU:
        raise ValueError(f"hidden_act={config['hidden_act']} is not supported, only silu")
    options = {**layer.options(config), "norm_eps": config["rms_norm_eps"]}
    with torch.device("meta"):
        return layer, mixers.create(layer.mixer, config["hidden_size"], **options)
