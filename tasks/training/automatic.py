"""Keys of a recipe that are chosen when the data is open: `recipe.batch_size=auto`, `recipe.learning_rate=find`, and
`recipe.updates` by `recipe.minutes`.

A run records the chosen values, and their keys in `recipe.chosen`. A resumed run keeps them, also if the data changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from longseq.tasks.config import UNITS, Choice
from longseq.tasks.training.configuration import flatten

AUTO = "auto"  # the task chooses the value by the data
FIND = "find"  # the value is searched before the run, see `longseq.tasks.training.trainer.find_learning_rate`

RATE = "learning_rate"
UPDATES, MINUTES = "updates", "minutes"
CHOSEN = "chosen"

# Options of models that tasks choose. `auto` of other options has a meaning of the model.
OF_MODELS = ("model.drop_path_rate",)

_ANY = {RATE: 1e-3, UPDATES: 1}  # until the rate is found and the updates are planned


def is_automatic(config: Mapping[str, Any]) -> bool:
    """True if a key of the recipe waits for the task's choice."""
    return any(value == AUTO for _, value in _choices(config["recipe"]))


def searches(config: Mapping[str, Any]) -> bool:
    """True if the learning rate is to be searched."""
    return bool(config["recipe"].get(RATE) == FIND)


def value_of(recipe: Mapping[str, Any], key: str, chosen: Any) -> Any:
    """The value that a recipe gives for a dotted key; `chosen` if it says `auto`."""
    value = _get(recipe, key)
    return chosen if value == AUTO else value


def settle(config: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The configuration with the values of `choice` where its recipe says `auto`, and their keys in `recipe.chosen`."""
    recipe = copy.deepcopy(dict(config["recipe"]))
    chosen = list(recipe.get(CHOSEN) or [])
    for key, value in choice.values.items():
        if _get(recipe, key) == AUTO:
            # A length in epochs becomes null if the recipe states it in another unit.
            others = [key.replace("epochs", unit) for unit in (UPDATES, "tokens", MINUTES) if key.endswith("epochs")]
            stated = any(_get(recipe, other) is not None for other in others)
            _put(recipe, key, None if stated else value)
            chosen.append(key)
    return {**config, "recipe": {**recipe, CHOSEN: chosen}}


def plans(config: Mapping[str, Any]) -> bool:
    """True if the updates are to be planned by `recipe.minutes`. ValueError if the recipe has another length, too."""
    recipe = config["recipe"]
    if recipe.get(MINUTES) is None or UPDATES in (recipe.get(CHOSEN) or []):
        return False
    for unit in UNITS:
        if recipe.get(unit) not in (None, AUTO):
            raise ValueError(f"recipe.{unit}={recipe[unit]} and recipe.minutes={recipe[MINUTES]}: give only one")
    return True


def with_found(config: Mapping[str, Any], **found: float) -> dict[str, Any]:
    """The configuration with a learning rate that was found, or with `updates` that were planned."""
    recipe = config["recipe"]
    return {**config, "recipe": {**recipe, **found, CHOSEN: [*(recipe.get(CHOSEN) or []), *found]}}


def with_any(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with any learning rate and updates, where they are not found or planned yet."""
    waiting = [*([RATE] if searches(config) else []), *([UPDATES] if plans(config) else [])]
    return {**config, "recipe": {**config["recipe"], **{key: _ANY[key] for key in waiting}}}


def as_chosen_before(config: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the values that an earlier run, of the configuration `saved`, chose."""
    earlier = saved.get("recipe") or {}
    recipe, taken = copy.deepcopy(dict(config["recipe"])), []
    for key in earlier.get(CHOSEN) or []:
        planned = key == UPDATES and plans(config) and recipe[MINUTES] == earlier.get(MINUTES)
        if planned or _get(recipe, key) in (AUTO, FIND):
            _put(recipe, key, _get(earlier, key))
            taken.append(key)
    return {**config, "recipe": {**recipe, CHOSEN: taken}} if taken else dict(config)


def restore_words(checked: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`checked` with what the recipe of `config` leaves open: the words `auto` and `find`, and updates by minutes."""
    for key, value in _choices(config["recipe"]):
        if value in (AUTO, FIND) or (key == UPDATES and plans(config)):
            _put(checked["recipe"], key, value)
    checked["recipe"][CHOSEN] = config["recipe"].get(CHOSEN)
    return checked


def _choices(recipe: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Dotted keys of a recipe that may be chosen, and their values."""
    return [(key, value) for key, value in flatten(recipe) if not key.startswith("model.") or key in OF_MODELS]


def _get(recipe: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if it is missing."""
    node: Any = recipe
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _put(recipe: dict[str, Any], key: str, value: Any) -> None:
    *places, last = key.split(".")
    node = recipe
    for part in places:
        node = node.setdefault(part, {})
    node[last] = value
