"""A search of hyperparameters: what its study belongs to, and at its end its best trial, on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf

from longseq.tasks.report import print_rows, shorten

# Where Optuna's sweeper writes the best trial, in the folder of the sweep.
RESULTS_FILE = "optimization_results.yaml"

METRIC, DIRECTION = "optimized_metric", "hydra.sweeper.direction"
_ATTRIBUTE = "longseq."  # what names of a study's attributes begin with that are ours
_MANY = 5  # the most keys that a message names


class BestTrial(Callback):
    """Binds a study that is kept to its metric and its command, and prints the best trial of a search by Optuna.

    conf/hparams_search names it.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        sweeper = config.hydra.sweeper
        if not sweeper.get("storage") or not sweeper.get("study_name"):
            return
        import optuna

        directions = _list_directions(sweeper.direction)
        told = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweeper opens it again, and its line is enough
        try:
            study = _open_study(str(sweeper.study_name), sweeper.storage, directions)
        finally:
            optuna.logging.set_verbosity(told)
        try:
            bind_study(study, describe_call(config), str(sweeper.study_name))
        except ValueError as error:
            # Hydra makes a warning of what a callback raises, and the search would go on.
            print(f"longseq: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        results = Path(config.hydra.sweep.dir) / RESULTS_FILE
        if not results.is_file():  # a trial failed, and its message tells
            return
        found: Any = OmegaConf.to_container(OmegaConf.load(results))
        rows = [(f"best {config.optimized_metric}", f"{found['best_value']:.4f}")]
        rows += [(str(key).lstrip("+"), _spell(value)) for key, value in found["best_params"].items()]
        print_rows([*rows, ("written", shorten(results))])


def _open_study(name: str, storage: Any, directions: list[str]) -> Any:
    """The study of this name, or a new one. One with other directions is opened, too, which `create_study` refuses."""
    import optuna

    with suppress(KeyError):
        return optuna.load_study(study_name=name, storage=storage)
    return optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)


def describe_call(config: DictConfig) -> dict[str, str]:
    """What the values of a search's trials depend on, besides what it searches: the metric, and the command's words.

    Words that a resumed run may change are left out, and those of Hydra, as those of the sweeper are.
    """
    from longseq.tasks.training.runs import FREE_KEYS

    free = tuple(f"{key}." for key in FREE_KEYS)
    words = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    fixed = {
        f"{'~' if word.is_delete() else ''}{word.key_or_group}": str(word.input_line).partition("=")[2]
        for word in words
        if not word.is_sweep_override() and not f"{word.key_or_group}.".startswith(free)
    }
    directions = _list_directions(config.hydra.sweeper.direction)
    return {**fixed, METRIC: str(config.optimized_metric), DIRECTION: ",".join(directions)}


def bind_study(study: Any, call: Mapping[str, str], name: str) -> None:
    """Keep in a study of Optuna what the values of its trials depend on.

    Raises:
        ValueError: in one line, the study has trials of another call, with which this call's cannot be compared.
    """
    kept = {key: value for key, value in study.user_attrs.items() if key.startswith(_ATTRIBUTE) and value is not None}
    bound = {key.removeprefix(_ATTRIBUTE): value for key, value in kept.items()}
    bound[DIRECTION] = ",".join(direction.name.lower() for direction in study.directions)
    is_measured = any(trial.state.name == "COMPLETE" for trial in study.trials)
    differing = [key for key in _in_order({**bound, **call}) if bound.get(key) != call.get(key)]
    if is_measured and not kept and DIRECTION in differing:  # nothing else is known of it
        differing = [DIRECTION]
    elif is_measured and not kept:
        print(
            f"longseq: warning: the study {name} does not tell of which metric and command its trials are: they are "
            "taken for trials of this one",
            file=sys.stderr,
        )
        is_measured = False
    if is_measured and differing:
        shown = "; ".join(
            f"{key}: {bound.get(key, 'not given')} there, {call.get(key, 'not given')} here"
            for key in differing[:_MANY]
        )
        shown += f"; and {len(differing) - _MANY} more" if len(differing) > _MANY else ""
        raise ValueError(
            f"hydra.sweeper.study_name={name} has trials of another search ({shown}): repeat that search's own words, "
            "or give another study_name"
        )
    for key in differing:
        study.set_user_attr(f"{_ATTRIBUTE}{key}", call.get(key))  # attributes cannot be removed


def _in_order(keys: Mapping[str, str]) -> list[str]:
    """The keys by name, the metric and its direction first."""
    return sorted(keys, key=lambda key: (key != METRIC, key != DIRECTION, key))


def _list_directions(direction: Any) -> list[str]:
    """The directions of a search, one for each metric, in words."""
    found: Sequence[Any] = direction if isinstance(direction, list | ListConfig) else [direction]
    return [one.name if isinstance(one, Enum) else str(one) for one in found]


def _spell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
