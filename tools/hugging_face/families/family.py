"""The families of models that other libraries save: what their config.json means, and how they call their weights.

A family is a table. Its `names` map a module of ours in a block to a module of theirs in a layer, or to several whose
weights are stacked in ours, with their rows. To find what a family cannot express, its `config` of our arguments must
give the same arguments again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longseq.blocks.rotary import check_rotary
from longseq.mixers import Mixer
from longseq.mixers.pattern import Pattern, expand_pattern, options_by_name

Values = Mapping[str, Any]
Names = Mapping[str, str | Mapping[str, int]]


ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
MLP = {"mlp.fc1_g": "mlp.gate_proj", "mlp.fc1_x": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
SILU = ("silu", "swish")

# Keys of transformers that our models do not have: values of single layers, quantized weights, another file of weights.
UNSUPPORTED = ("per_layer_config", "quantization_config", "transformers_weights")


@dataclass(frozen=True)
class Family:
    """A kind of model as another library saves it.

    Attributes:
        model_type, architecture: what config.json calls it.
        arguments: the arguments of `TokenBackbone` for a config.json that has its defaults filled in.
        config: the config.json for arguments of `TokenBackbone`.
        mixers: the names of its mixers.
        mixer_names: the names in a layer of a mixer's modules and parameters.
        block_names: the names of the other modules in a block.
        defaults: keys that config.json may leave out.
        expected: required values of keys; with others, our model would compute something else.
        transposed: how the names of matrices end that ours has transposed.
        layer: how the names of layer {i} begin.
        ends: the names outside of the layers.
    """

    model_type: str
    architecture: str
    arguments: Callable[[Values], dict[str, Any]]
    config: Callable[[Values], dict[str, Any]]
    mixers: tuple[str, ...]
    mixer_names: Callable[[Any], Names]
    block_names: Names
    defaults: Values = field(default_factory=dict)
    expected: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    layer: str = "model.layers.{i}."
    ends: Names = field(default_factory=lambda: ENDS)

    def read_config(self, found: Values) -> dict[str, Any]:
        """The arguments of `TokenBackbone` for a config.json.

        Raises:
            ValueError: it has a value that our models do not have.
        """
        for key in UNSUPPORTED:
            if found.get(key):
                raise ValueError(f"{key} is not supported")
        values = {**self.defaults, **found}
        for key, allowed in self.expected.items():
            if key in values and values[key] not in allowed:
                choices = " or ".join(str(value) for value in allowed)
                raise ValueError(f"{key}={values[key]} is not supported, only {choices}")
        return self.arguments(values)

    def names(self, blocks: Sequence[Mixer]) -> dict[str, str | Mapping[str, int]]:
        """Their names of all our modules, for a model with these mixers."""
        found: dict[str, str | Mapping[str, int]] = dict(self.ends)
        for index, mixer in enumerate(blocks):
            ours, theirs = f"blocks.{index}.", self.layer.format(i=index)
            for name, other in {**self.block_names, **self.mixer_names(mixer)}.items():
                parts = theirs + other if isinstance(other, str) else {theirs + k: rows for k, rows in other.items()}
                found[ours + name] = parts
        return found


def common_arguments(values: Values, *, eps: str) -> dict[str, Any]:
    """The arguments that all families spell alike; `eps` is the key of the norms' epsilon."""
    return {
        "vocab_size": values["vocab_size"],
        "d_model": values["hidden_size"],
        "depth": values["num_hidden_layers"],
        "norm_eps": values[eps],
        "tie_embeddings": values["tie_word_embeddings"],
    }


def common_config(arguments: Values, *, eps: str) -> dict[str, Any]:
    """The inverse of `common_arguments`."""
    return {
        "vocab_size": arguments["vocab_size"],
        "hidden_size": arguments["d_model"],
        "num_hidden_layers": arguments["depth"],
        eps: arguments["norm_eps"],
        "tie_word_embeddings": arguments["tie_embeddings"],
        "hidden_act": "silu",
    }


def mlp_width(arguments: Values) -> int:
    """The width of the MLPs."""
    return round(arguments["d_model"] * arguments["mlp_ratio"])


def layers_of(arguments: Values) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """The mixer of each layer, and the options of each mixer by name."""
    pattern: Pattern = arguments["mixer"]
    names = expand_pattern(pattern, arguments["depth"])
    return names, options_by_name(pattern, arguments["mixer_options"])


def choose_layers(layers: Sequence[str], options: Mapping[str, Values]) -> dict[str, Any]:
    """The arguments `mixer` and `mixer_options` for a mixer in each layer."""
    used = list(dict.fromkeys(layers))
    if len(used) == 1:
        return {"mixer": used[0], "mixer_options": dict(options[used[0]])}
    return {"mixer": list(layers), "mixer_options": {name: dict(options[name]) for name in used}}


def read_rotary(values: Values) -> dict[str, Any]:
    """Base and scaling of the rotary positions, of files that have rope_theta and rope_scaling, or rope_parameters."""
    # A rope_scaling that somebody has added to a newer file replaces its rope_parameters, as in transformers.
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if "type" in rope:  # the older name
        rope["rope_type"] = rope.pop("type")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope parameters of single kinds of layers are not supported")
    kind, base = rope.pop("rope_type", "default"), rope.pop("rope_theta", values.get("rope_theta", 10000.0))
    part = rope.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if part != 1:
        raise ValueError(f"partial_rotary_factor={part} is not supported, only 1")
    if kind == "default":
        return {"rotary": True, "rotary_base": float(base), "rotary_scaling": None}
    if kind in ("llama3", "yarn"):
        # transformers prefers the top-level number to the one among the rope parameters.
        if "original_max_position_embeddings" in values:
            rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", values.get("max_position_embeddings"))
    scaling = {"rope_type": kind, **{key: value for key, value in rope.items() if value is not None}}
    check_rotary(scaling)
    return {"rotary": True, "rotary_base": float(base), "rotary_scaling": scaling}
