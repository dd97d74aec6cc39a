"""Sweeps, `longseq VERB -m key=A,B`: which are refused, where their trials write, and which trials failed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode

from longseq.tasks.training.automatic import FIND
from longseq.tasks.training.options import Range, check_value
from longseq.tools import cli
from longseq.tools.mistakes import full_flag

# What the file that a verb writes is named by; other verbs write one only if `output` names it.
NAMED_BY: Mapping[str, tuple[str, ...]] = {
    "evaluate": ("output", "checkpoint", "split", "input"),
    "predict": ("output",),
    "harness": ("output", "checkpoint"),
    "export": ("output", "checkpoint", "format"),
    "convert": ("output",),
    "prepare": ("output",),
    "prepare image": ("output",),
}

# What makes a command a sweep: a flag, or a value of these keys.
FLAGS = ("-m", "--multirun")
SWITCHES = ("hydra.mode", "hparams_search")
FOLDER_KEYS = ("output", "hydra.run.dir")  # of a run; those of a sweep's trials lie below hydra.sweep.dir
RATE = "recipe.learning_rate"
SEARCHED = (RATE, "++recipe.optimizer.weight_decay")  # as conf/hparams_search/optuna.yaml spells them
SAMPLER_SEED = "hydra.sweeper.sampler.seed"
# Keys of Optuna's sweeper whose values it refuses late, or reads as no search.
SEARCH_KEYS: Mapping[str, Any] = {
    "hydra.sweeper.n_trials": Annotated[int, Range(1)],
    "hydra.sweeper.n_jobs": Annotated[int, Range(1)],
    "hydra.sweeper.max_failure_rate": Annotated[float, Range(0, 1)],
    "hydra.sweeper.direction": Literal["minimize", "maximize"] | list[Literal["minimize", "maximize"]],
}

# Hydra's own sweeper, which runs one trial after the other.
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"

_MANY = 8  # the most failed trials that the last line names


def prepare(verb: str, flags: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The overrides of a command, those of a sweep as its trials need them.

    Trials of `longseq train` have folders of their own below the folder that `output` or `hydra.run.dir` names.

    Raises:
        ValueError: in one line, a sweep whose trials would replace each other's files, of a verb that trains several
            runs itself, or with values that search nothing.
    """
    if not _may_sweep(flags, overrides):  # nearly all commands, which need not be parsed twice
        return list(overrides)
    given = _parse(overrides)
    if given is None or not _is_sweep(flags, given):
        return list(overrides)
    if verb == cli.SWEEPS_ITSELF:
        raise ValueError(
            "-m: longseq compare trains a run for each value itself: leave -m out, and give mixers=[A,B], seeds=[0,1] "
            "or 'sweep={KEY: [A, B]}'"
        )
    if verb == "train":
        _check_search(given)
        drawn = [f"{SAMPLER_SEED}=null"] if _storage(given) is not None and SAMPLER_SEED not in given else []
        fixed = _fixed(given) if "hparams_search" in given else {}
        return [*(fixed.get(one, one) for one in _with_folder(given, overrides)), *drawn]
    _refuse_one_file(verb, given)
    return list(overrides)


def _parse(overrides: Sequence[str]) -> dict[str, Override] | None:
    """The overrides by key, the last of each; None if Hydra cannot read one, which it tells itself."""
    try:
        return {_key(one): one for one in OverridesParser.create().parse_overrides(list(overrides))}
    except HydraException:
        return None


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _may_sweep(flags: Sequence[str], overrides: Sequence[str]) -> bool:
    return _asks(flags) or any(key in one.partition("=")[0] for one in overrides for key in SWITCHES)


def _asks(flags: Sequence[str]) -> bool:
    return any(full_flag(flag) in FLAGS for flag in flags)


def _is_sweep(flags: Sequence[str], given: Mapping[str, Override]) -> bool:
    mode, search = (given.get(key) for key in SWITCHES)
    return (
        _asks(flags)
        or (mode is not None and str(mode.value()).upper() == "MULTIRUN")
        or (search is not None and search.value() not in (None, "null"))
    )


def _check_search(given: Mapping[str, Override]) -> None:
    for key, hint in SEARCH_KEYS.items():
        if key in given and not given[key].is_sweep_override():
            check_value(hint, given[key].value(), key)
    search, rate = (given.get(key) for key in ("hparams_search", RATE))
    if (storage := _storage(given)) is not None:
        _check_storage(storage, given)
    if search is None:
        return
    if rate is not None and rate.value() == FIND:
        raise ValueError(f"{RATE}={FIND}: {search.input_line} searches that rate already: leave one of the two out")
    for fixed in _fixed(given):
        print(f"longseq: warning: {fixed} is given, and so is not searched", file=sys.stderr)
    metric = given.get("optimized_metric")
    if metric is not None and metric.value() is None:
        raise ValueError(f"optimized_metric=null: {search.input_line} needs a metric to optimize: leave the key out")


def _fixed(given: Mapping[str, Override]) -> dict[str, str]:
    """The overrides that fix a key which hparams_search would try values of, and each as the search spells its key.

    The sweeper leaves a key out of the search if it is spelled as there, with the same plus signs.
    """
    searched = list(SEARCHED)
    params = given.get("hydra.sweeper.params")
    own: Any = None if params is None else params.value()
    searched += [str(key) for key in own] if isinstance(own, Mapping) else []
    spelled = {key.lstrip("+"): key for key in searched}
    return {
        str(one.input_line): f"{spelled[key]}={str(one.input_line).partition('=')[2]}"
        for key, one in given.items()
        if key in spelled and not one.is_sweep_override() and not one.is_delete()
    }


def _storage(given: Mapping[str, Override]) -> Override | None:
    """The override that keeps the study of a search."""
    storage = given.get("hydra.sweeper.storage")
    return None if storage is None or storage.value() in (None, "") else storage


def _check_storage(storage: Override, given: Mapping[str, Override]) -> None:
    if "://" not in str(storage.value()):
        raise ValueError(f"{storage.input_line} is no address of a database: give one such as sqlite:///study.db")
    if "hydra.sweeper.study_name" not in given:
        raise ValueError(
            f"{storage.input_line} keeps a study, which the same command finds by its name: add "
            "hydra.sweeper.study_name=NAME"
        )
    # Optuna 2, which Hydra's sweeper needs, fails with an AssertionError there.
    if installed_major("optuna") == 2 and (installed_major("sqlalchemy") or 0) >= 2:
        # The newest alembic, which Optuna needs, too, takes SQLAlchemy 2 alone.
        raise ValueError(
            f"{storage.input_line}: optuna 2 keeps studies by SQLAlchemy 1.4: pip install 'sqlalchemy<2' 'alembic<1.16'"
        )


def installed_major(package: str) -> int | None:
    """The first number of an installed package's version; None without the package."""
    try:
        return int(metadata.version(package).partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _with_folder(given: Mapping[str, Override], overrides: Sequence[str]) -> list[str]:
    """The overrides with the folder of a run as that of the sweep, unless its name tells the trials apart."""
    named = next((key for key in FOLDER_KEYS if key in given and _is_fixed(given[key])), None)
    if named is None:
        return list(overrides)
    both = [given[key].input_line for key in (*FOLDER_KEYS, "hydra.sweep.dir") if key in given]
    if len(both) > 1:
        raise ValueError(f"{both[0]} and {both[1]} both name the folder of the sweep: leave one out")
    old = str(given[named].input_line)
    return [f"hydra.sweep.dir={old.partition('=')[2]}" if one == old else one for one in overrides]


def _is_fixed(override: Override) -> bool:
    """True if each trial gets the same value."""
    value = override.value()
    return not override.is_sweep_override() and value not in (None, "") and "${" not in str(value)


def _refuse_one_file(verb: str, given: Mapping[str, Override]) -> None:
    """ValueError if several trials of a verb other than train write to the same file."""
    output = given.get("output")
    if output is None and verb not in NAMED_BY:
        return
    if output is not None and not output.is_sweep_override() and "${" in str(output.value()):
        return
    namers = NAMED_BY.get(verb, ()) if output is None or output.value() is None else ("output",)
    for key, override in given.items():
        if override.is_sweep_override() and key not in namers:
            raise ValueError(
                f"{override.input_line}: all trials would write to the same file: name one for each, such as "
                f"'output=${{{key}}}{_ending(verb, output)}'"
            )


def _ending(verb: str, output: Override | None) -> str:
    """The ending of the files that a verb writes, as the command or the verb's default has it."""
    endings = {"evaluate": ".json", "predict": ".csv", "harness": ".json", "export": ".onnx", "generate": ".jsonl"}
    told = "" if output is None or output.is_sweep_override() else str(output.value()).rpartition("/")[2]
    if "." in told:
        return f".{told.rpartition('.')[2]}"
    return endings.get(verb, "")


class Trials:
    """The trials of a sweep that run in this process, and those that failed; of another command, nothing.

    `given` are the command's words, which all trials share.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self.given, self.folder = given, Path()
        self.count = 0
        self.counted = False  # True if Hydra's own sweeper runs them, which goes on after one that fails
        self.failed: dict[str, str] = {}
        self._errors: list[Exception] = []
        self._own: list[str] = []

    def begin(self, running: Any) -> None:
        """Note the next trial, of which `running` is Hydra's configuration."""
        if running.mode != RunMode.MULTIRUN:
            return
        self.count += 1
        self.folder = Path(running.sweep.dir).absolute()
        self._own = [str(word) for word in running.overrides.task if word not in self.given]
        here = "basic_launcher" in str(running.launcher._target_)  # else in another process
        self.counted = here and running.sweeper._target_ == BASIC_SWEEPER

    def fail(self, error: Exception, told: str) -> str | None:
        """Note that the trial has failed. The line to print of it, or None if it is that of another trial."""
        self._errors.append(error)
        known = told in self.failed.values()
        name = " ".join(self._own) or f"number {self.count}"
        self.failed[name if name not in self.failed else f"{name} (number {self.count})"] = told
        faulty = [word for word in self._own if word.partition("=")[2] in told]  # none: the fault is another key's
        return None if known else f"{told} (trial {' '.join(faulty)})" if faulty else told

    def goes_on(self, error: Exception) -> bool:
        """True if a sweep tries its other trials after this error of one."""
        return self.counted or self.survives(error)

    def survives(self, error: Exception) -> bool:
        """True for the error of a trial that a search does without: the trial has diverged."""
        # its class need not be imported here
        return self.count > 0 and not self.counted and type(error).__name__ == "NonFiniteError"

    @property
    def has_none(self) -> bool:
        """True if trials ran and none of them succeeded."""
        return 0 < self.count == len(self.failed)

    def knows(self, error: Exception) -> bool:
        """True for the error of a trial, which a sweeper may raise again at its end."""
        return any(error is one for one in self._errors)

    def describe_failures(self) -> str | None:
        """The last line of a sweep: which of its trials failed. None if none did, or all for one reason.

        That reason was printed last, but in a search, where the sweeper prints lines of its own behind it.
        """
        reasons = set(self.failed.values())
        alike = self.has_none and len(reasons) == 1
        if not self.failed or not self.count or (alike and self.counted):
            return None
        if alike:
            return f"{self.count} of {self.count} trials failed: {reasons.pop()}"
        names = list(self.failed)
        more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
        return f"{len(names)} of {self.count} trials failed: {', '.join(names[:_MANY])}{more}"
