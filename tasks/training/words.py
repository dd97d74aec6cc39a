"""Words that follow from others in a command: the length of a run in one unit, and the model of `init=FILE`."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from longseq.hub import find_source
from longseq.models import read
from longseq.tasks import registry
from longseq.tasks.config import UNITS

INIT = "init"  # the option of the groups `mixer`, `scale` and `model` that describes the model of `init`

_NAMES = ("--config-name", "-cn")  # flags that name the configuration of a run, which describes its model


def complete(verb: str, words: list[str]) -> list[str]:
    """The words of a command that trains or describes a model, with those that follow from them.

    A length replaces the recipe's. A model that starts from `init=FILE` is like that of the file, except in the groups
    that the command chooses; the config.yaml of a run, which --config-name names, has its own model.
    """
    words = with_length(words)
    if any(word.startswith("init=") for word in words) and not any(word.startswith(_NAMES) for word in words):
        return [*words, *_words_of_init(words, _compose(verb, words))]
    return words


def with_length(words: Sequence[str]) -> list[str]:
    """The words, and null for the other units if they state the length of a run (`recipe.updates=100`)."""
    lengths = [f"recipe.{unit}" for unit in UNITS]
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    states = any(given.get(key, "null") != "null" for key in lengths)
    return [*words, *(f"++{key}=null" for key in lengths if states and key not in given)]


def _compose(verb: str, words: Sequence[str]) -> DictConfig:
    """What Hydra composes from the words of a command, without its sweeps."""
    parser, flags = OverridesParser.create(), dict(pairwise(words))
    overrides = [word for word in words if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    overrides = [word for word in overrides if not parser.parse_override(word).is_sweep_override()]
    flags |= dict(word.split("=", 1) for word in words if word.startswith("--config-dir="))
    if (folder := flags.get("--config-dir") or flags.get("-cd")) is not None:
        overrides.append(f"hydra.searchpath=['file://{Path(folder).absolute()}']")
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return compose(verb, overrides)


def _words_of_init(words: Sequence[str], config: DictConfig) -> list[str]:
    """Choices of groups that describe the model of `config.init`, stored as options in Hydra's ConfigStore."""
    task, source = registry.of(config).model, config.init
    if source is None or task.is_weights(source):
        return []
    saved = read(find_source(source), label=f"init={source}")
    arguments: dict[str, Any] = saved.config.get("model_args") or {}
    options = arguments.get("mixer_options") or {}
    nodes: dict[str, Any] = {"model": task.like(saved.config)}
    if "mixer" in arguments:
        sizes = {"embed_dim": arguments.get("d_model") or arguments["embed_dim"], "depth": arguments["depth"]}
        heads = {name: options[name] for name in ("num_heads", "head_dim") if options.get(name)}
        nodes["mixer"] = {"name": arguments["mixer"], "options": options}
        nodes["scale"] = {"name": INIT, "model": "tiny", **sizes, "mixer": heads}
        for name in ("d_model", *sizes):  # the scale's
            nodes["model"].pop(name, None)
    chosen = {word.lstrip("+").partition("=")[0] for word in words}
    taken = [group for group, node in nodes.items() if node and group not in chosen]
    for group in taken:
        ConfigStore.instance().store(group=group, name=INIT, node=nodes[group])
    found = [f"{group}={INIT}" for group in taken]
    if (saved.text or {}).get("tokenizer") and "tokenizer" in config.data and "data.tokenizer" not in chosen:
        found.append("data.tokenizer=null")
    return found
