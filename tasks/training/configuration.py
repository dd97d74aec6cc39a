"""The resolved configuration of a run, the keys of token models, and values as words of a command."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf

from longseq.tasks.config import Count, Keys, Positive, Share, key, read

Config = Mapping[str, Any]
T = TypeVar("T", bound=Keys)

CLASS_TABLES = ("class_weights", "class_map")  # keys of `data` with a value for each name of a class

_UNQUOTED = re.compile(r"[\w/+.$%*@?|:-]+", re.ASCII)


class BodyKeys(Keys):
    """The keys of `model` for models with the body of a `TokenBackbone`."""

    label: str = key(..., "the name in tables")
    d_model: Count | None = key(None, "the width")
    depth: Count | None = key(None, "the number of blocks")
    direction: Literal["forward", "bidirectional", "alternating"] | None = key(
        None, "forward, bidirectional (each layer reads both ways), alternating (every second one backwards)"
    )
    mlp: Literal["swiglu", "gelu", "rwkv", "rwkv7", "none"] | None = key(None, "the MLP of a block")
    mlp_ratio: Positive | None = key(None, "its width over the model's; null: 8/3, 7/2 of rwkv, 4 of rwkv7")
    mlp_bias: bool | None = key(None, "biases in the MLP")
    norm: Literal["rms", "layer"] | None = key(None, "the norm")
    norm_eps: Positive | None = key(None, "what is added to the variance")
    norm_order: Literal["pre", "post"] | None = key(None, "norm what a layer reads (pre) or what it adds (post)")
    positions: Literal["none", "learned"] | None = key(None, "embeddings of positions")
    max_length: Count | None = key(None, "the number of learned positions; null: the longest sequence")
    embedding_norm: bool | None = key(None, "norm the embeddings, as RWKV does")
    dropout: Share | None = key(None, "of the embeddings")
    drop_path: Share | None = key(None, "stochastic depth")
    residual_in_float32: bool | None = key(None, "add the layers in float32")
    recompute: Literal["none", "mixer", "block"] | None = key(None, "what the backward pass computes again, for memory")
    backend: Literal["auto", "torch", "reference", "triton"] | None = key(None, "kernels of all mixers")


class TokenModelKeys(BodyKeys):
    """The keys of `model`, explained in `longseq.backbones.tokens.TokenBackbone`."""

    name: Literal["token"] = key("token", "the kind of model")
    tie_embeddings: bool | None = key(None, "the head is the embedding")


def mixer_label(pattern: Any) -> str:
    """Resolver `${mixer_label:${mixer.name}}`: the name of a mixer, or of the pattern of a hybrid, as text."""
    if isinstance(pattern, str) and pattern.isidentifier():
        return pattern
    from longseq.mixers.pattern import spell_pattern  # it imports all mixers, which `--help` need not wait for

    return spell_pattern(pattern)


def by_width(width: int, table: Mapping[Any, Any]) -> Any:
    """Resolver `${by_width:WIDTH,{0: A, 384: B}}`: the value of the largest width in the table up to WIDTH."""
    return table[max(least for least in table if least <= width)]


def better(metric: str | None) -> str:
    """Resolver `${better:METRIC}`: maximize or minimize, by the name of a metric."""
    low = ("loss", "perplexity", "bits_per_byte", "error", "seconds", "parameters", "_ms", "_gib", "epochs", "updates")
    name = str(metric)
    return "minimize" if any(word in name for word in low) and not name.endswith("_per_second") else "maximize"


OmegaConf.register_new_resolver("mixer_label", mixer_label, replace=True)
OmegaConf.register_new_resolver("by_width", by_width, replace=True)
OmegaConf.register_new_resolver("better", better, replace=True)
OmegaConf.register_new_resolver("times", lambda first, second: first * second, replace=True)
# `${either:FLAG,A,B}` is A if the flag is true, else B; a key that a file does not state is null.
OmegaConf.register_new_resolver("either", lambda flag, first, second: first if flag else second, replace=True)


def resolve(config: DictConfig | Config) -> dict[str, Any]:
    """The configuration as dictionaries and lists, with all interpolations resolved."""
    if not isinstance(config, DictConfig):
        return dict(config)
    metric = OmegaConf.select(config, "task.metric")
    if isinstance(metric, str) and "/" not in metric:  # other keys refer to it
        config = OmegaConf.merge(config, {"task": {"metric": f"val/{metric}"}})  # type: ignore[assignment]
    found: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    data = found.get("data")
    for name in CLASS_TABLES if isinstance(data, dict) else ():
        # A dictionary by class names may be text: keys with accents or signs are not in Hydra's grammar.
        text = data.get(name)
        if isinstance(text, str) and text.startswith("{"):
            data[name] = OmegaConf.to_container(OmegaConf.create(re.sub(r":(?=[\d.+-])", ": ", text)))
    return found


def read_command(keys: type[T], config: DictConfig) -> T:
    """The keys of a command, from its YAML file and the command line."""
    return read(keys, resolve(config))


def spell_value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, in quotes where a character has a meaning there."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {spell_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spell_value, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    escaped = value.replace("'", "\\'")
    return value if _UNQUOTED.fullmatch(value) else f"'{escaped}'"


def command_word(name: str, value: Any) -> str:
    """The word KEY=VALUE of a command, quoted for a shell and for Hydra."""
    return shlex.quote(f"{name}={spell_value(value)}")


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested configuration."""
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config


def with_absolute_root(config: Config) -> dict[str, Any]:
    """The configuration with absolute paths in `data.root`; what is no path, such as a stream's name, stays."""
    data = config.get("data") or {}
    root = data.get("root")
    if not root:
        return dict(config)
    whole = [_absolute(one) for one in root] if isinstance(root, list) else _absolute(root)
    return {**config, "data": {**data, "root": whole}}


def _absolute(path: str) -> str:
    found = os.path.expanduser(path)
    return os.path.abspath(found) if os.path.exists(found) else path


def refer(value: Any, output: str) -> Any:
    """The value with `${output}` in place of that folder at the beginning of paths."""
    if isinstance(value, Mapping):
        return {key: refer(part, output) for key, part in value.items()}
    if isinstance(value, list):
        return [refer(part, output) for part in value]
    if isinstance(value, str) and (value == output or value.startswith(f"{output}/")):
        return "${output}" + value[len(output) :]
    return value
