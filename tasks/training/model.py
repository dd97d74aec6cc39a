"""The interface of every task's model builder, mixer options of configurations, and frozen layers."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from timm.models._manipulate import group_with_matcher
from torch import Tensor, nn

from longseq import mixers
from longseq.backbones.likeness import find_difference
from longseq.mixers.pattern import options_by_name
from longseq.tasks.training.checkpoint import Loaded, load

_log = logging.getLogger(__name__)

_HEAD = "?"  # no parameter has this name; its layer is the one after the blocks
_AVERAGE = "running_mean"  # a buffer of batch norms only


class TaskModel(ABC):
    """Builds the models of a task; `starts_from` are other tasks whose checkpoints `init` takes."""

    starts_from: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def build(self, config: Mapping[str, Any], info: Any) -> nn.Module:
        """The model that `config.model` names, for the data of `info`, with weights drawn from `config.seed`."""

    def like(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `model`, and Hydra's defaults for them, for a model like that of a config.json.

        Dropout and other keys of a training keep their defaults. Empty for a model from which the task cannot start.
        """
        return {}

    def initialize(self, model: nn.Module, trained: nn.Module) -> None:
        """Copy the weights of `trained`; only a head may have other shapes, and keeps its initial weights."""
        if copy_weights(model, trained.state_dict()):
            _log.warning("the head is new: the weights have one with other shapes")

    def start(self, model: nn.Module, config: Mapping[str, Any], info: Any) -> None:
        """Give a new model the weights that `config.init` names. ValueError if they do not fit."""
        loaded = load(config["init"], key="init", tasks=(config["task"]["name"], *self.starts_from))
        self.start_from(model, loaded, info)

    def start_from(self, model: nn.Module, loaded: Loaded, info: Any) -> None:
        """Copy the weights of `loaded`, which `init` names. ValueError if its model or data do not fit `info`."""
        self.initialize(model, loaded.backbone)

    def is_weights(self, path: str) -> bool:
        """True if `init` names a file with only weights, in the format of another library."""
        return False


def refuse_difference(own: Mapping[str, Any], its: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """ValueError if models with these arguments compute different functions of the same weights."""
    if (found := find_difference(own, its, ignored=ignored)) is not None:
        raise ValueError(f"init: {found.name} is {found.one} in the new model and {found.other} in that of the file")


def copy_weights(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Load `state`, except a head (`model.get_classifier()`) whose shapes differ; True if some of it was left out.

    ValueError if other weights differ.
    """
    classifier = getattr(model, "get_classifier", nn.Identity)()
    head = tuple(f"{name}." for name, module in model.named_modules() if name and module is classifier)
    own = model.state_dict()
    fitting = {key: value for key, value in state.items() if key in own and value.shape == own[key].shape}
    differing = sorted((own.keys() | state.keys()) - fitting.keys())
    differing = [key for key in differing if key not in own or not key.startswith(head)]
    if differing:
        raise ValueError(f"init: {len(differing)} weights do not fit the model, {differing[0]} first")
    model.load_state_dict(fitting, strict=False)
    return fitting.keys() != own.keys()


def mixer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `config.mixer`, with the scale's options where they are not set; for a hybrid, by mixer name."""
    filled = options_by_name(config["mixer"]["name"], config["mixer"].get("options"))
    usual = config["scale"].get("mixer") or {}
    for name, chosen in filled.items():
        if chosen.get("num_heads") is None:  # a given number of heads determines their width
            known = mixers.options(name)
            unset = {key: value for key, value in usual.items() if key in known and chosen.get(key) is None}
            filled[name] = chosen | unset
    return filled if len(filled) > 1 else next(iter(filled.values()))


def freeze(model: nn.Module, part: int | str | None) -> None:
    """Exclude a part of a model's parameters from training (`recipe.freeze`).

    `part` is a number N for the embeddings and the first N blocks, `embeddings`, `body` for everything but the head and
    the pooling before it, or None. Layers are from the model's `group_matcher`. Frozen batch norms are in evaluation
    mode and keep their statistics. ValueError if nothing would be left to train.
    """
    if part is None:
        return
    described: Any = model
    averages = [name for name, _ in model.named_buffers() if name.endswith(f".{_AVERAGE}")]
    names = [*dict(model.named_parameters()), *averages, _HEAD]
    layer_of = group_with_matcher(((name, None) for name in names), described.group_matcher(coarse=False), reverse=True)
    blocks = layer_of[_HEAD] - 1
    last = {"embeddings": 0, "body": blocks}[part] if isinstance(part, str) else part
    for name, parameter in model.named_parameters():
        if layer_of[name] <= last:
            parameter.requires_grad_(False)
    for name in averages:
        if layer_of[name] <= last:
            model.get_submodule(name.removesuffix(f".{_AVERAGE}")).eval()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"recipe.freeze={part} leaves nothing to train")
