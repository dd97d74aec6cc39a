"""Models whose class a plug-in defines, and which a configuration names: any `nn.Module` that maps images to logits."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from longseq.arguments import copy_containers
from longseq.blocks.sharding import unsharded_class
from longseq.plugins import find_class
from longseq.timm_models import DECISION, WEIGHT_SOURCES, read_stated, stated_by, stated_decision

# The argument that names the class, next to the arguments of its constructor.
TARGET = "_target_"

# The attribute of a model with the name of its class and its constructor's arguments.
_MADE = "_plugin_arguments"


def make_plugin_model(target: Any, arguments: Mapping[str, Any], key: str = f"model.{TARGET}") -> nn.Module:
    """Build the model whose class `target` names in a loaded plug-in; `key` and errors as for `find_class`."""
    model: Any = find_class(target, nn.Module, key)(**arguments)
    setattr(model, _MADE, {TARGET: target, **copy_containers(arguments)})
    return model


def is_plugin_model(model: nn.Module) -> bool:
    """Whether `make_plugin_model` made the model, and can make it again."""
    made = getattr(model, _MADE, None)
    return made is not None and made[TARGET].rpartition(".")[2] == unsharded_class(model).__name__


def describe_plugin_model(model: nn.Module) -> dict[str, Any]:
    """The keys of config.json for such a model: `model_args`, with the name of its class, and what it states."""
    made: Any = getattr(model, _MADE)
    stated = {key: value for key, value in stated_by(model).items() if key not in WEIGHT_SOURCES}
    stated = {key: list(value) if isinstance(value, tuple) else value for key, value in stated.items()}
    names, classes = stated.pop("label_names", None), stated.pop("num_classes", None)
    return {
        "model_args": copy_containers(made),
        **({"num_classes": classes} if classes is not None else {}),
        **({"label_names": names} if names else {}),
        **({"pretrained_cfg": stated} if stated else {}),
        **({DECISION: decision} if (decision := stated_decision(model)) else {}),
    }


def rebuild_plugin_model(config: Mapping[str, Any], changes: Mapping[str, Any]) -> nn.Module:
    """Build the model of a config.json, without its weights; its plug-in must be loaded."""
    arguments = {**config["model_args"], **changes}
    target = arguments.pop(TARGET)
    model: Any = make_plugin_model(target, arguments, TARGET)
    model.pretrained_cfg = model.default_cfg = read_stated(config)
    if config.get(DECISION):
        setattr(model, DECISION, dict(config[DECISION]))
    return model
