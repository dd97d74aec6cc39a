"""The interface of every task's model builder, and the mixer options that their configurations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longseq import mixers
from longseq.backbones.likeness import find_difference
from longseq.mixers.pattern import options_by_name
from longseq.models import PretrainedModel, describe, kind_of
from longseq.parameters import count_parameters
from longseq.tasks.data.labels import name_some
from longseq.tasks.training.memory import machine_memory
from longseq.tasks.training.options import spell
from longseq.tasks.training.runs import flatten

if TYPE_CHECKING:
    from longseq.tasks.training.checkpoint import Loaded


# The bytes of a parameter in float32: of its weight, of its gradient, and of what optimizers keep of it at least, by a
# part of their names: Adam and its kin keep two averages, Muon keeps one.
WEIGHT_BYTES, GRADIENT_BYTES = 4, 4
AVERAGES_BYTES = {"adam": 8, "muon": 4}

# More layers than any published model has. A larger number is a slip, and takes hours to build.
MOST_LAYERS = 4096

# What was found when a model took trained weights. A run tells it.
_NOTES: MutableMapping[nn.Module, list[str]] = WeakKeyDictionary()


class TaskModel(ABC):
    """Builds the models of a task.

    Class attributes:
        starts_from: other tasks whose checkpoints `init` takes.
    """

    starts_from: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def build(self, config: Mapping[str, Any], info: Any) -> nn.Module:
        """The model that `config.model` names, for the data of `info`; its weights are drawn from `config.seed`.

        ValueError, in one line, for an unknown model, mixer, option or size.
        """

    def check(self, config: Mapping[str, Any]) -> None:
        """ValueError, in one line and before the data is opened, for a model that could be built for no data.

        By default nothing is checked, and `build` says it.
        """
        return

    def outline(self, config: Mapping[str, Any], info: Any) -> nn.Module | None:
        """The model of `build` without memory for its weights; None, as here, for one that cannot be made so.

        ValueError, in one line, as of `build`, and if the weights alone are larger than this machine's memory.
        """
        return None

    def remarks(self, model: nn.Module) -> list[str]:
        """What a user may not expect of the model that a run trains, in a line each."""
        return []

    def notes(self, model: nn.Module) -> list[str]:
        """Which weights the model of a run begins with, as far as a user may want to know, in a line each.

        These are the lines of `note`.
        """
        return _NOTES.get(model, [])

    def initialize(self, model: nn.Module, trained: nn.Module) -> None:
        """Copy the weights of `trained`; a head with other shapes keeps its initial weights, and a note tells it.

        ValueError if other shapes differ, too.
        """
        if copy_weights(model, trained.state_dict()):
            note(model, "the head is new: that of the weights has other shapes")

    def start_from(self, model: nn.Module, loaded: Loaded, info: Any) -> None:
        """Copy the weights of the checkpoint or folder that `init` names, for the data of `info`.

        ValueError, in one line, for a model that does not fit the new one, or was trained on data that does not fit.
        """
        self.initialize(model, loaded.backbone)

    def untrained(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The configuration with which `build` reads no weights: a run that continues has those of its checkpoint."""
        return config

    def is_weights(self, path: str) -> bool:
        """True if `init` names a file of weights alone, in the format of another library."""
        return False

    def start_from_weights(self, model: nn.Module, config: Mapping[str, Any], info: Any) -> None:
        """Copy the weights of a file for which `is_weights` is true. ValueError, in one line, if they do not fit."""
        raise NotImplementedError

    def load_options(self, trained: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `checkpoint.load` with which a model can read its data after `changes` of the keys of `data`.

        `trained` is the info of the model's own data.
        """
        return {}

    def check_reads(self, model: nn.Module, trained: Any, found: Any) -> None:
        """Raise ValueError if a model, trained on data with the info `trained`, cannot read that of `found`."""
        return


def note(model: nn.Module, line: str) -> None:
    """Keep a line for `TaskModel.notes`."""
    _NOTES.setdefault(model, []).append(line)


def note_new_head(model: nn.Module, own: Sequence[str], theirs: Sequence[str]) -> None:
    """Note that the head is new, as the classes `own` of the data are not those of the weights."""
    others = f"those of the weights are {name_some(theirs)}" if theirs else "the weights name none"
    note(model, f"the head is new: the classes are {name_some(own)}, and {others}")


@contextmanager
def without_weights() -> Iterator[None]:
    """Models made inside have no memory for their weights, and what they draw is given back."""
    with torch.random.fork_rng([]), torch.device("meta"):
        yield


def outlined(config: Mapping[str, Any], build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes for a configuration, without memory for its weights.

    ValueError, in one line, for a model with weights that this machine's memory cannot hold.
    """
    try:
        with without_weights():
            model = build()
    except RuntimeError as error:
        if "overflow" not in str(error):  # torch's word for a tensor of more than 2**63 bytes
            raise
        raise ValueError(f"the model is too large for any memory: {_lower(config)}") from error
    check_memory(config, model, WEIGHT_BYTES, "weights")
    return model


def check_trainable(config: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ValueError, in one line, for a model that cannot be trained in the memory of the run's machines.

    What training keeps of every parameter is counted: the weight, its gradient, and the averages of AVERAGES_BYTES.
    With `recipe.freeze`, some parameters have a weight alone, and nothing is counted.
    """
    if config["recipe"].get("freeze") is not None:
        return
    optimizer = str(config["recipe"]["optimizer"]).lower()
    averages = next((count for name, count in AVERAGES_BYTES.items() if name in optimizer), 0)
    parts = "weights, gradients and averages" if averages else "weights and gradients"
    check_memory(config, model, WEIGHT_BYTES + GRADIENT_BYTES + averages, parts)


def check_memory(config: Mapping[str, Any], model: nn.Module, kept: int, parts: str) -> None:
    """Raise ValueError, in one line, if `kept` bytes of each parameter are more than the memory of the machines.

    `parts` says what these bytes are.
    """
    nodes, memory, count = config["trainer"].get("num_nodes") or 1, machine_memory(), count_parameters(model)
    if memory is not None and count * kept > nodes * memory:
        place = "this machine has" if nodes == 1 else f"{nodes} such machines have"
        raise ValueError(
            f"the model has {count:,} parameters: in float32 its {parts} take {count * kept / 2**30:,.0f} GiB, and "
            f"{place} {nodes * memory / 2**30:,.0f} GiB of memory: {_lower(config)}"
        )


def check_depth(config: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for more layers than `MOST_LAYERS`."""
    places = {"scale": config["scale"], "recipe.model": config["recipe"].get("model"), "model": config["model"]}
    for place, keys in places.items():
        depth = (keys or {}).get("depth")
        if isinstance(depth, int) and depth > MOST_LAYERS:
            raise ValueError(f"{place}.depth={depth} must be a whole number of at most {MOST_LAYERS}")


def _lower(config: Mapping[str, Any]) -> str:
    """The remedy for a model that is too large: the key with the largest number among those of its sizes."""
    groups = {"model": config["model"], "mixer": config["mixer"], "data": {"img_size": config["data"].get("img_size")}}
    sizes = {
        key: value for key, value in flatten(groups) if isinstance(value, int | float) and not isinstance(value, bool)
    }
    key = max(sizes, key=lambda name: sizes[name], default=None)
    return "give lower sizes" if key is None else f"give lower sizes, such as of {key}={spell(sizes[key])}"


def refuse_difference(own: Mapping[str, Any], its: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """ValueError, which names the key to give, for the first argument of a model that the one of a file has not."""
    if (found := find_difference(own, its, ignored=ignored)) is None:
        return
    option, _, mixer = found.name.partition(" of ")
    place = f"+mixer.options.{mixer}.{option}" if "+" in own["mixer"] else f"mixer.options.{option}"
    key = place if mixer else "mixer" if found.name == "mixer" else f"model.{found.name}"
    raise ValueError(
        f"init: {found.name} is {spell(found.one)} in the new model and {spell(found.other)} in that of the file: "
        f"give {key}={spell(found.other)}"
    )


def copy_weights(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Load `state`; the head (`model.get_classifier()`, if there is one) keeps its weights if the shapes differ.

    True if some of the head's weights were kept.
    """
    wanted, classifier = model.state_dict(), getattr(model, "get_classifier", nn.Identity)()
    head = tuple(f"{name}." for name, module in model.named_modules() if name and module is classifier)
    kept = {
        key: value
        for key, value in state.items()
        if not (key.startswith(head) and key in wanted and value.shape != wanted[key].shape)
    }
    differing = sorted(key for key in wanted.keys() | kept.keys() if _shape(wanted, key) != _shape(kept, key))
    differing = [key for key in differing if not (key.startswith(head) and key not in kept)]
    if differing:
        raise ValueError(
            f"init: the checkpoint's model differs from the new one in {len(differing)} weights, {differing[0]} first; "
            f"repeat its model, mixer and scale"
        )
    model.load_state_dict(kept, strict=False)
    return not kept.keys() >= wanted.keys()


def mixer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `config.mixer`, with the scale's options where they are not set; for a hybrid, by mixer name."""
    chosen = options_by_name(config["mixer"]["name"], config["mixer"].get("options"))
    usual = config["scale"].get("mixer") or {}
    filled = {name: _fill_in(name, options, usual) for name, options in chosen.items()}
    return filled if len(filled) > 1 else next(iter(filled.values()))


def values_in_force(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The configuration with the values of `model` in place of keys that are null.

    A key stays null if it leaves a choice to a timm model, which does not report its choice.
    """
    built = _arguments(model)
    options = built.get("mixer_options") or {}
    # A configuration has the options of a mixer in the group of the mixer.
    own = {name: value for name, value in built.items() if name != "mixer_options" or name in config["model"]}
    filled = {**config, "model": _fill(config["model"], own)}
    if "mixer" in config and "mixer" in built:
        filled["mixer"] = {**config["mixer"], "options": _fill(config["mixer"].get("options") or {}, options)}
    return filled


def reads_mixer(model: nn.Module) -> bool:
    """True if a model, or the model that it wraps, has a mixer: those of timm and linear ones have none."""
    return "mixer" in _arguments(model)


def _arguments(model: nn.Module) -> Mapping[str, Any]:
    """The arguments of a model, or of the model that it wraps."""
    if not isinstance(model, PretrainedModel):
        return describe(model)["model_args"] if kind_of(model) is not None else {}
    wrapped = [value for value in model.arguments.values() if isinstance(value, PretrainedModel)]
    return wrapped[0].arguments if wrapped else model.arguments


def _fill(keys: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with `values` in place of None; options by mixer name are filled one by one."""
    filled = dict(keys)
    for name, value in values.items():
        if isinstance(value, Mapping):
            filled[name] = _fill(filled.get(name) or {}, value)
        elif name in filled and filled[name] is None:
            filled[name] = value
    return filled


def _fill_in(name: str, chosen: dict[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    known = mixers.options(name)
    unset = {key: value for key, value in usual.items() if key in known and chosen.get(key) is None}
    # A given number of heads determines their width.
    return chosen | (unset if chosen.get("num_heads") is None else {})


def _shape(state: Mapping[str, Tensor], key: str) -> torch.Size | None:
    return state[key].shape if key in state else None
