"""The command line's message for a mistake: one line, with the nearest name that exists."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from longseq.tasks.training.configuration import MARKS, marks_at_top
from longseq.tasks.training.options import nearest, unknown_key

CONF = "longseq.conf"

# Hydra's flags; argparse also accepts beginnings of the long ones.
FLAGS = ("-h", "--help", "--hydra-help", "--version", "--resolve", "-r", "--run", "-m", "--multirun")
FLAGS_WITH_VALUES = (
    *("-c", "--cfg", "-p", "--package", "-i", "--info", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "-sc", "--shell-completion", "--experimental-rerun"),
)

_NOT_THERE = re.compile(r"Could not override '(?P<key>[^']+)'")


def check_arguments(verb: str, arguments: Sequence[str]) -> None:
    """Raise ValueError for an argument of `longseq VERB` that is neither key=value nor a flag of Hydra."""
    value_of: str | None = None
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument.split("=", 1)[0]
            begins = [name for name in (*FLAGS, *FLAGS_WITH_VALUES) if name.startswith(flag) and flag.startswith("--")]
            if not begins and flag not in (*FLAGS, *FLAGS_WITH_VALUES):
                raise ValueError(
                    f"{argument} is no flag: keys are written key=value, such as recipe.epochs=5; "
                    f"`longseq {verb} --help` lists them"
                )
            value_of = flag if "=" not in argument and flag not in FLAGS else None
        elif "=" not in argument and not argument.startswith("~") and value_of is None:
            raise ValueError(f"{argument!r} is no override: write key=value; `longseq {verb} --help` lists the keys")
        else:
            value_of = None


def is_users(error: BaseException) -> bool:
    """True for a mistake in the command or data, which one line explains; False for a bug, which needs a traceback."""
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # of a file of the command, a full disk
        return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, (ValueError, HydraException, OmegaConfBaseException, YAMLError))


def explain(error: BaseException, verb: str, arguments: Sequence[str]) -> str:
    """One line about the error of `longseq VERB arguments...`."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, InterpolationResolutionError):
        error = _raised_by_resolver(error) or error
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"no such file or folder: {error.filename}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return _unknown_option(error.missing_cfg_file, error.options)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        place = "" if error.filename is None else f"{error.filename}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return place + ("the disk is full: make room first" if full else (error.strerror or str(error)).lower())
    if isinstance(error, ConfigCompositionException) and (match := _NOT_THERE.match(str(error))):
        return _unknown_key(match["key"], verb, arguments) or " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return f"""{error.override} cannot be read: put the value in quotes, "{key}='{value}'\""""
    return " ".join(str(error).split())


def _unknown_option(path: str, options: Sequence[str]) -> str:
    group, _, option = path.rpartition("/")
    near = nearest(option, options)
    hint = f"did you mean {group}={near}? " if near else ""
    return f"{group}={option} is unknown: {hint}the options of {group} are {', '.join(options)}"


def _unknown_key(key: str, verb: str, arguments: Sequence[str]) -> str | None:
    """What is unknown in a dotted key, found by composing the configuration without that override."""
    overrides = [argument for argument in arguments if "=" in argument or argument.startswith("~")]
    node: Any = _compose_without(key, verb, overrides)
    if node is None:
        return None
    place = ""
    for part in key.split("."):
        if node is None:
            return f"{place} is null: give the whole of it, such as {place}={{{part}: VALUE}}"
        if not isinstance(node, Mapping):
            return f"{place} is one value and has no key {part}: give {place}=VALUE"
        if part not in node:
            marks = MARKS if place else marks_at_top(node)
            return unknown_key(part, [str(name) for name in node if name not in marks], place)
        node, place = node[part], f"{place}.{part}" if place else part
    if isinstance(node, Mapping):
        names = ", ".join(str(name) for name in node if name not in MARKS)
        return f"{place} has no options here: give {place}.KEY=VALUE, a KEY of {names}"
    return None


def _compose_without(key: str, verb: str, overrides: Sequence[str]) -> Any:
    """The configuration without the overrides of a key, and of other unknown keys; None if that fails, too."""
    kept = [override for override in overrides if _key_of(override) != key]
    try:
        with initialize_config_module(CONF, version_base="1.3"):
            return OmegaConf.to_container(compose(verb.replace(" ", "_"), kept), resolve=False)
    except HydraException as error:
        match = _NOT_THERE.match(str(error))
        return _compose_without(match["key"], verb, kept) if match and len(kept) < len(overrides) else None


def _key_of(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _raised_by_resolver(error: BaseException) -> ValueError | None:
    """The user's mistake that one of our resolvers found; OmegaConf wraps it with the key that it was resolving."""
    origin = error.__context__
    while origin is not None and type(origin) is not ValueError:
        origin = origin.__context__
    return origin
