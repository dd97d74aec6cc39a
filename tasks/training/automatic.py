"""Keys that are chosen when the data is open: `recipe.batch_size=auto` and the like, and `recipe.learning_rate=find`.

A run records the chosen values, and their keys in `recipe.chosen`. A resumed run keeps them, also if the data changed.
"""

import copy
from collections.abc import Mapping
from typing import Any

from longseq.tasks.config import spell
from longseq.tasks.training.configuration import flatten

AUTO = "auto"  # the task chooses the value by the data
FIND = "find"  # the value is searched before the run, see `longseq.tasks.training.trainer.find_learning_rate`

CHOSEN = "chosen"

# Keys that tasks choose, besides those of the recipe. `auto` of other options has a meaning of the model or the data.
OTHERS = (
    "recipe.model.drop_path_rate",
    *(f"data.{key}" for key in ("tokenizer", "max_length", "truncation", "random_crops", "segment")),
    *(f"model.{key}" for key in ("direction", "hashed_ngrams", "ngram_buckets", "mlp", "dropout", "head_dropout")),
)


def is_automatic(config: Mapping[str, Any]) -> bool:
    """True if a key waits for the task's choice."""
    return any(value == AUTO for _, value in _choices(config))


def searches(config: Mapping[str, Any]) -> bool:
    """True if the learning rate is to be searched."""
    return bool(config["recipe"].get("learning_rate") == FIND)


def value_of(config: Mapping[str, Any], key: str, chosen: Any) -> Any:
    """The value that a configuration gives for a dotted key; `chosen` if it says `auto`."""
    value = _get(config, key)
    return chosen if value == AUTO else value


def settle(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the values of dotted keys where it says `auto`, and these keys in `recipe.chosen`."""
    settled = copy.deepcopy(dict(config))
    chosen = list(config["recipe"].get(CHOSEN) or [])
    for key, value in values.items():
        if _get(config, key) == AUTO:
            # A length in epochs becomes null if the recipe states it in another unit.
            others = [key.replace("epochs", unit) for unit in ("updates", "tokens") if key.endswith("epochs")]
            stated = any(_get(config, other) is not None for other in others)
            _put(settled, key, None if stated else value)
            chosen.append(key)
    settled["recipe"][CHOSEN] = chosen
    return settled


def with_rate(config: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The configuration with a learning rate that was found."""
    chosen = [*(config["recipe"].get(CHOSEN) or []), "recipe.learning_rate"]
    return {**config, "recipe": {**config["recipe"], "learning_rate": rate, CHOSEN: chosen}}


def with_any_rate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with any learning rate, where it is not found yet."""
    return {**config, "recipe": {**config["recipe"], **({"learning_rate": 1e-3} if searches(config) else {})}}


def as_chosen_before(config: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the values that an earlier run, of the configuration `saved`, chose."""
    settled, taken = copy.deepcopy(dict(config)), []
    for key in (saved.get("recipe") or {}).get(CHOSEN) or []:
        if _get(settled, key) in (AUTO, FIND):
            _put(settled, key, _get(saved, key))
            taken.append(key)
    if taken:
        settled["recipe"][CHOSEN] = taken
    return settled


def restore_words(checked: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`checked` with what `config` leaves open: the words `auto` and `find`."""
    for key, value in _choices(config):
        if value in (AUTO, FIND):
            _put(checked, key, value)
    checked["recipe"][CHOSEN] = config["recipe"].get(CHOSEN)
    return checked


def _choices(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Dotted keys that may be chosen, and their values."""
    recipe = flatten({"recipe": {key: value for key, value in config["recipe"].items() if key != "model"}})
    return [*recipe, *((key, _get(config, key)) for key in OTHERS)]


def describe(config: Mapping[str, Any]) -> str:
    """The keys of `recipe.chosen` and their values in one line."""
    values = {key: _get(config, key) for key in config["recipe"][CHOSEN]}
    return ", ".join(f"{key.removeprefix('recipe.')}={spell(value)}" for key, value in values.items())


def _get(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if it is missing."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *places, last = key.split(".")
    node = config
    for part in places:
        node = node.setdefault(part, {})
    node[last] = value
