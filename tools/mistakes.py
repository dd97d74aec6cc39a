"""The command line's message for a mistake: one line, with the nearest name that exists."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

import longseq.conf
from longseq.tasks.training.configuration import MARKS, marks_at_top, resolve
from longseq.tasks.training.options import nearest, unknown_key
from longseq.tasks.training.processes import own_name
from longseq.tools import cli

CONF = "longseq.conf"

# Hydra's flags; argparse also accepts beginnings of the long ones.
FLAGS = (
    *("-h", "--help", "--hydra-help", "--version", "--resolve", "-r", "--run", "-m", "--multirun"),
    *("-sc", "--shell-completion"),
)
# Flags with a value, and the values that they take; None: any.
FLAGS_WITH_VALUES: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("-c", "--cfg"), ("job", "hydra", "all")),
    **dict.fromkeys(("-i", "--info"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    **dict.fromkeys(("-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")),
    "--experimental-rerun": None,
}

# Files of Hydra's own plug-ins, and what to install for them: extras of this package, or packages.
HYDRA_PLUGINS = {
    "hydra/sweeper/optuna": "longseq[optuna]",
    "hydra/sweeper/sampler": "longseq[optuna]",
    "hydra/launcher/submitit": "longseq[submitit]",
    **{f"hydra/launcher/{name}": f"hydra-{name}-launcher" for name in ("joblib", "ray", "rq")},
    **{f"hydra/sweeper/{name}": f"hydra-{name}-sweeper" for name in ("ax", "nevergrad")},
}

# Verbs with groups of files, and the groups in which a name without a group is searched for.
GROUPED = ("train", "describe")
GROUPS = ("task", "data", "mixer", "model", "scale", "recipe")

# Names of other programs, and the last part of our keys for the same thing.
SYNONYMS = {
    **dict.fromkeys(("lr", "base_lr", "max_lr"), "learning_rate"),
    **dict.fromkeys(("b", "bs", "batch", "train_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "steps", "num_steps", "iterations"), "updates"),
    **dict.fromkeys(("wd",), "weight_decay"),
    **dict.fromkeys(("gpu", "gpus", "num_gpus"), "devices"),
    **dict.fromkeys(("j", "workers", "n_workers", "dataloader_num_workers"), "num_workers"),
    **dict.fromkeys(("image_size", "input_size", "resolution"), "img_size"),
    **dict.fromkeys(("smoothing",), "label_smoothing"),
    **dict.fromkeys(("dim", "width", "hidden_size", "d_model"), "embed_dim"),
    **dict.fromkeys(("layers", "num_layers", "num_hidden_layers"), "depth"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_grad_norm", "gradient_clip_val"), "gradient_clip"),
    **dict.fromkeys(("ckpt", "ckpt_path", "model_path", "weights_path"), "checkpoint"),
    **dict.fromkeys(("data_dir", "data_path", "dir", "folder", "path"), "root"),
    **dict.fromkeys(("output_dir", "out", "save_dir", "outdir"), "output"),
    **dict.fromkeys(("random_seed",), "seed"),
    **dict.fromkeys(("optimizer", "optim"), "opt"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "sched"),
}

# Names of other programs, and the words that do the same here.
REMEDIES = {
    "device": "trainer=gpu or trainer=cpu",
    "pretrained": "model=timm model.name=NAME model.pretrained=true",
    **dict.fromkeys(("model_name_or_path", "initial_checkpoint", "pretrained_model"), "init=FILE"),
    **dict.fromkeys(("data_dir", "data_path", "train_dir", "root"), "data=image_folder data.root=FOLDER"),
    **dict.fromkeys(
        ("checkpoint", "ckpt", "ckpt_path"), "init=FILE to begin with its weights, or resume=FILE to continue its run"
    ),
    **dict.fromkeys(("config", "config_file"), "--config-dir FOLDER --config-name NAME"),
    **dict.fromkeys(("fp16", "amp", "bf16"), "trainer=gpu, which computes in bf16-mixed"),
    **dict.fromkeys(("do_train", "do_eval", "fit"), "nothing: `longseq train` trains, validates and tests"),
}

# Our own message about a key that an override with a plus has added, which Hydra then knows.
_ADDED = re.compile(r"(?P<key>[\w.]+) is unknown: the keys")
_NOT_THERE = re.compile(r"Could not override '(?P<key>[^']+)'")
_THERE = re.compile(r"Could not append to config\. An item is already at '(?P<key>[^']+)'")
_NOTHING_TO_DELETE = re.compile(r"Could not delete from config\. '(?P<key>[^']+)'")
_NO_OPTION = re.compile(r"Could not find '(?P<path>[^']+)'")
_NO_REFERENCE = re.compile(r"Interpolation key '(?P<key>[^']+)' not found\s+full_key: (?P<place>\S+)")
_CHOSEN = re.compile(r"Multiple values for (?P<group>\S+)\. To override a value use 'override \S+: (?P<option>[^']+)'")
_NO_GROUP = re.compile(r"Error resolving interpolation '\$\{(?P<group>\w+)\}'")
_OTHER_TYPE = re.compile(r"Error merging override (?P<override>.+)")
_SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '(?P<override>.+?)'\s", re.DOTALL)


def check_arguments(verb: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of `longseq VERB`: Hydra's flags, which argparse needs first, and the overrides.

    Raises:
        ValueError: an argument is neither key=value nor a flag, or a flag has no value or a wrong one.
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            if "=" not in argument and rest and rest[0].startswith("="):
                value = rest[0][1:] or " ".join(rest[1:2])
                raise ValueError(f"{argument} {rest[0]}: write {argument}={value} without blanks around the =")
            overrides.append(_check_override(argument, verb, arguments))
            continue
        begin, has_value, value = argument.partition("=")
        flag = full_flag(begin)
        if flag is None:
            raise ValueError(_no_flag(argument, rest, verb))
        flags.append(argument)
        if flag in FLAGS:
            if has_value:
                raise ValueError(f"{argument}: {flag} takes no value")
            continue
        choices = FLAGS_WITH_VALUES[flag]
        if not has_value:
            value = rest.pop(0) if rest else ""
            flags.append(value)
        if not value or (choices and value not in choices):
            needed = f"one of {', '.join(choices)}" if choices else "a value"
            raise ValueError(f"{flag} needs {needed}" + (f", and {value} is none" if value else ""))
        if flag in ("-cd", "--config-dir") and Path(value).is_file():
            place = Path(value)
            raise ValueError(f"{flag} {value} is a file: give --config-dir {place.parent} --config-name {place.stem}")
        if flag == "--experimental-rerun" and not (value.endswith(".pickle") and Path(value).is_file()):
            raise ValueError(f"{flag} {value}: there is no such file of Hydra's; give the config.pickle of a job")
    _check_folders(verb, overrides)
    return flags, overrides


def find_repeats(overrides: Sequence[str]) -> list[str]:
    """A remark for each key that is given several values, of which the last counts; dictionaries are merged."""
    given: dict[str, list[str]] = {}
    for override in overrides:
        if override[:1] != "~" and not override.partition("=")[2].startswith("{"):
            given.setdefault(_key_of(override), []).append(override)
    return [
        f"{key} is given {len(words)} times: {words[-1]} counts, and not {words[0]}"
        for key, words in given.items()
        if len({word.partition("=")[2] for word in words}) > 1
    ]


def _check_folders(verb: str, overrides: Sequence[str]) -> None:
    """ValueError for a folder of Hydra's in which the command writes nothing. A sweep's is that of its trials."""
    given = {_key_of(override): override for override in overrides}
    # Lightning adds the folder to the commands of the processes that it starts.
    is_started = os.environ.get("LOCAL_RANK", "0") != "0"
    if "hydra.run.dir" not in given or "hydra.job.chdir" in given or is_started:
        return
    told = f"{given['hydra.run.dir']} has no effect"
    if verb != "train":
        raise ValueError(f"{told} on longseq {verb}, whose files have keys such as output: leave it out")
    if "output" in given:
        raise ValueError(f"{told} beside {given['output']}: leave one out")


def full_flag(begin: str) -> str | None:
    """The flag that `begin` is, or of which it is the beginning."""
    known = (*FLAGS, *FLAGS_WITH_VALUES)
    if begin in known:
        return begin
    found = [flag for flag in known if begin.startswith("--") and flag.startswith(begin) and begin != "--"]
    return found[0] if len(found) == 1 else None


def _check_override(argument: str, verb: str, arguments: Sequence[str]) -> str:
    key, has_value, value = argument.partition("=")
    if not has_value and not argument.startswith("~"):
        hint = "write key=value"
        if verb == "train" and argument in REMEDIES:
            hint = f"write {REMEDIES[argument]}"
        elif meant := _key_before(argument, verb, {_key_of(one) for one in arguments if "=" in one}):
            hint = f"did you mean {meant}?"
        raise ValueError(f"{argument!r} is no override: {hint}; `longseq {verb} --help` lists the keys")
    if not key or re.search(r"\s|\.\.|^\.|\.$", key):
        raise ValueError(f"{argument}: {key!r} is no key; write key=value without blanks around the =")
    if value == "None":
        raise ValueError(f"{argument}: write {key}=null for none, or \"{key}='None'\" for the text")
    several = re.fullmatch(r"\[(\s*\w+\s*,)+\s*\w+\s*,?\s*\]", value)
    if several and key in GROUPS and verb in GROUPED:
        raise ValueError(f"{argument}: {_one_of_group(key, value[1:-1])}")
    if key.lstrip("+") == "hydra.job.chdir" and value.lower() in ("true", "yes", "on", "1"):
        raise ValueError(f"{argument}: paths are those of the folder in which the command starts; leave it out")
    return argument


def _key_before(value: str, verb: str, given: set[str]) -> str | None:
    """The override whose value was given without its key: a path, or a file of a group; None for another word."""
    if Path(value).exists():
        keys = re.findall(r"(\w+)=(?:FILE|FOLDER)\b", cli.VERBS[verb].example)
        key = next((key for key in keys if key not in {*given, "output"}), None)
        if key is not None:
            return f"{key}={value}"
        return _as_data(value) if verb == "train" else f"checkpoint={value}" if verb == "describe" else None
    if verb not in GROUPED or not re.fullmatch(r"\w+", value):
        return None
    group = next((group for group in GROUPS if group not in given and value in _files_of(f"{group}/")), None)
    return f"{group}={value}" if group else None


def _no_flag(argument: str, rest: Sequence[str], verb: str) -> str:
    flag, has_value, value = argument.partition("=")
    name = flag.lstrip("-").replace("-", "_").rpartition(".")[2]
    if not has_value and rest and not rest[0].startswith("-") and "=" not in rest[0]:
        value = rest[0]
    node = _compose_without("", verb, [])
    place = None if node is None else _place_of(name, node)
    remedy = REMEDIES.get(name) if verb == "train" and _is_other(place) else None
    if name == "data" and verb == "train" and (files := _as_data(value)):
        remedy = files
    told = (
        f"write {remedy}" if remedy else f"write {place}={value or 'VALUE'}" if place else "keys are written key=value"
    )
    return f"{argument} is no flag: {told}; `longseq {verb} --help` lists the keys"


def _is_other(place: str | None) -> bool:
    """True where a name of another program is no key here, or that of a callback with another meaning."""
    return place is None or place.startswith("callbacks.")


def _as_data(path: str) -> str | None:
    """The keys for data in a folder or file of the user's; None for other files, and if nothing is there."""
    images, documents = f"data=image_folder data.root={path}", f"task=document data=documents data.root={path}"
    if Path(path).is_dir() and path:
        return images
    if not Path(path).is_file():
        return None
    table = f"{documents}, or for a table of images {images} data.source=csv"
    return {".tar": images, ".jsonl": documents, ".csv": table}.get(Path(path).suffix)


def _place_of(name: str, node: Mapping[str, Any]) -> str | None:
    """The dotted key whose last part is `name`, or what other programs call so, nearest to the top."""
    places = sorted(_places(node), key=lambda place: place.count("."))
    wanted = (name, SYNONYMS.get(name))
    return next((place for one in wanted for place in places if place.rpartition(".")[2] == one), None)


def _places(node: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key, value in node.items():
        inner = f"{place}.{key}" if place else str(key)
        if key not in MARKS:
            yield inner
            if isinstance(value, Mapping):
                yield from _places(value, inner)


def is_users(error: BaseException) -> bool:
    """True for a mistake in the command, the data or a plug-in, which one line explains; False for a bug of longseq,
    which needs a traceback.
    """
    known = isinstance(error, (OSError, ValueError, HydraException, OmegaConfBaseException, YAMLError))
    # Lightning's class for options that contradict each other or the data, which need not be imported here.
    return known or type(error).__name__ == "MisconfigurationException"


def explain(error: BaseException, verb: str, arguments: Sequence[str]) -> str:
    """One line about the error of `longseq VERB arguments...`.

    It begins with the process of a run, if that is not the first one, unless the error tells processes by itself.
    """
    told, process = _explain(error, verb, arguments), own_name()
    return told if process is None or told.startswith("process ") else f"{process}: {told}"


def _in_one_line(error: BaseException) -> str:
    """The words of an error; of one that a data worker raised, without its traceback."""
    text = str(error).strip()
    if " in DataLoader worker process " in text:
        text = text.rpartition(f"{type(error).__name__}: ")[2]
    return " ".join(text.split())


def _explain(error: BaseException, verb: str, arguments: Sequence[str]) -> str:
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, InterpolationResolutionError):
        error = _raised_by_resolver(error) or error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        name = _value_of(("-cn", "--config-name"), arguments)
        if name is not None and error.missing_cfg_file.removesuffix(".yaml") == name.removesuffix(".yaml"):
            folders = (_value_of(flags, arguments) for flags in (("-cd", "--config-dir"), ("-cp", "--config-path")))
            return _unknown_configuration(name, next((one for one in folders if one and Path(one).is_dir()), None))
        return _unknown_option(error.missing_cfg_file, error.options or _files_of(error.missing_cfg_file))
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return _explain_system(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    text = _in_one_line(error)
    if isinstance(error, UnicodeEncodeError) and "surrogates not allowed" in text:
        return "a name of a file has letters that this locale does not have: set PYTHONUTF8=1 in the environment"
    if text.startswith("Config group override must be a string"):
        odd = next((one for one in arguments if re.fullmatch(r"[\w/]+=([\d.]+|null|true|false|\{.*\})", one)), "")
        group = odd.partition("=")[0]
        if odd.endswith("=null") and "none" in _files_of(f"{group}/"):
            return f"{odd} names no file of the group {group}: give {group}=none"
        return f"{odd} names no file of the group {group}; `longseq {verb} --help` lists them"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        told = _explain_hydra(text, verb, arguments)
        return told or re.sub(r" (full_key: \S+|object_type=\S+|reference_type=\S+|Config search path:.*)", "", text)
    if match := _ADDED.match(text):
        added = next((one for one in arguments if one.startswith("+") and _key_of(one) == match["key"]), None)
        told = _unknown_key(match["key"], verb, arguments) if added else None
        # Without a hint the message as it is lists more keys: those that a model of timm takes.
        return told if told and "did you mean" in told else text
    return text


def _explain_system(error: OSError) -> str:
    """One line about an error of the system: what it says of the file, and what helps."""
    path = error.filename
    if isinstance(path, bytes):  # TensorBoard's
        path = os.fsdecode(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        told = "the disk is full: make room first"
    elif path is None:
        told = error.strerror or " ".join(str(error).split()) or type(error).__name__
    elif error.errno == errno.ENOENT:
        return f"no such file or folder: {path}"
    elif error.errno == errno.EISDIR:
        told = "is a folder, and a file is needed: name a file"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        file = next((place for place in (Path(path), *Path(path).parents) if place.is_file()), None)
        if file is not None:
            return f"{file} is a file, and a folder is needed there: give another name"
        told = (error.strerror or str(error)).lower()
    else:
        told = (error.strerror or str(error)).lower()
    return told if path is None else f"{path}: {told}"


def _explain_hydra(text: str, verb: str, arguments: Sequence[str]) -> str | None:
    """Our words for a message of Hydra or OmegaConf; None if the message says it well."""
    if match := _NOT_THERE.match(text):
        return _unknown_key(match["key"], verb, arguments)
    if match := _THERE.match(text):
        return f"{match['key']} is there already: write {_override_of(match['key'], arguments).lstrip('+')}, without +"
    if match := _NOTHING_TO_DELETE.match(text):
        return f"~{match['key']} removes nothing: there is no key {match['key']}, or it is null"
    if match := _NO_OPTION.search(text):
        return _unknown_option(match["path"], _files_of(match["path"]))
    if match := _NO_REFERENCE.search(text):
        removed = next(
            (one for one in arguments if one[:1] == "~" and f"{match['key']}.".startswith(f"{one[1:]}.")), None
        )
        told = f"{match['place']} reads ${{{match['key']}}}"
        return f"{removed}: {told}, so the key must stay" if removed else f"{told}, and there is no such key"
    if match := _CHOSEN.match(text):
        return f"{match['group']} is chosen already: write {match['group']}={match['option']}, without +"
    if (match := _NO_GROUP.match(text)) and (removed := f"~{match['group']}") in arguments:
        return f"{removed}: files are chosen by ${{{match['group']}}}, so the key must stay"
    if match := _OTHER_TYPE.match(text):
        if match["override"].startswith("~"):
            return f"{match['override']}: the key must stay: leave {match['override']} out"
        return (
            f"{match['override']} has another type than the key takes: `longseq {verb} --cfg job` shows its value, and "
            "those of the keys below it"
        )
    if match := _SEVERAL_VALUES.match(text):
        return _several_values(match["override"], verb, arguments)
    return None


def _several_values(override: str, verb: str, arguments: Sequence[str]) -> str:
    key, _, value = override.partition("=")
    if key in GROUPS and verb in GROUPED:
        return f"{override}: {_one_of_group(key, value)}; -m runs the command with each"
    told = f"{key}={value} has several values: write {key}=[{value}] for a list, \"{key}='{value}'\" for text"
    if re.fullmatch(r"-?\d+,\d+", value) and _is_decimal(key, verb, arguments):
        return f"{told}, or {key}={value.replace(',', '.')} for a number, whose decimals follow a point"
    return told if verb == cli.SWEEPS_ITSELF else f"{told}, or add -m, which runs the command with each"


def _one_of_group(group: str, several: str) -> str:
    names = [name.strip() for name in several.split(",") if name.strip()]
    told = "give one name"
    if group != "mixer":
        return told
    return (
        f"{told}; `longseq compare 'mixers=[{','.join(names)}]'` trains one model with each, and mixer=hybrid "
        f"mixer.name={'+'.join(names)} makes one model of all"
    )


def _is_decimal(key: str, verb: str, arguments: Sequence[str]) -> bool:
    """True if the value of a key without this override is a number with decimals."""
    node = _compose_without(key, verb, [one for one in arguments if "=" in one and one[:1] != "-"])
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return isinstance(node, float)


def _unreadable(override: str) -> str:
    key, _, value = override.partition("=")
    told = f"{override} cannot be read"
    place, _, name = key.rpartition(".")
    if place.lstrip("+") in cli.TABLES:
        return f"{told}: names of classes stand in the value, {place}={{{name}: {value}}}"
    if not key.isascii():
        return f"{told}: keys have no letters but a to z; `longseq VERB --help` lists them"
    if value.startswith("="):
        return f"{told}: write {key}{value}, with one ="
    if any(value.count(one) != value.count(other) for one, other in ("[]", "{}", "()")):
        return f"{told}: a bracket is not closed; a value with brackets of its own stands in quotes, \"{key}='...'\""
    if value.count("'") % 2 or value.count('"') % 2:
        return f"{told}: a quote is not closed, or needs a \\ before it"
    if re.fullmatch(r"\[[^][{}()'\"]+\]", value):  # the entries of a list are text, and the list is none
        entries = ", ".join(f"'{one.strip()}'" for one in value[1:-1].split(",") if one.strip())
        return f'{told}: put its entries in quotes, "{key}=[{entries}]"'
    quoted = f"'{value}'" if "'" not in value else value.replace("'", "\\'").join("''")
    return f'{told}: put the value in quotes, "{key}={quoted}"'


def _override_of(key: str, arguments: Sequence[str]) -> str:
    return next((one for one in arguments if _key_of(one) == key), f"{key}=VALUE")


def _files_of(path: str) -> list[str]:
    """The options of the group of a file that is missing; those in folders of the group are FOLDER/NAME."""
    folder = Path(longseq.conf.__path__[0]) / path.partition("/")[0]
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))


def _unknown_option(path: str, options: Sequence[str]) -> str:
    for missing, extra in HYDRA_PLUGINS.items():
        if path.startswith(missing):
            return f"{path} needs a package of Hydra's: pip install '{extra}'"
    group, _, option = path.rpartition("/")
    if path.startswith("data/") and (files := _as_data(path.removeprefix("data/"))):
        return f"data={path.removeprefix('data/')} is no name of data: give {files}"
    if "/" in "".join(options):  # a group with folders
        group, _, option = path.partition("/")
    if group == "mixer" and "+" in option:
        return f"mixer={option} names several mixers: give mixer=hybrid mixer.name={option}"
    if group == "model" and (told := _named_by_timm(option)):
        return f"model={option} is unknown here: {told}"
    meant = {"cuda": "gpu"}.get(option, option.lower()) if group == "trainer" else option.lower()
    near = nearest(meant, options) or next((one for one in options if one.rpartition("/")[2] == option), None)
    hint = f"did you mean {group}={near}? " if near else ""
    return f"{group}={option} is unknown: {hint}the options of {group} are {', '.join(options)}"


def _unknown_configuration(name: str, folder: str | None) -> str:
    """That --config-name names no file, of a folder that --config-dir names or of this package."""
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    if folder is None:
        place = "." if Path(file).is_file() else "FOLDER"
        return (
            f"there is no configuration {name}: give --config-dir {place}, too, for a file {file} in it, or leave "
            "--config-name out"
        )
    known = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in Path(folder).rglob("*.yaml"))
    if not known:
        return f"there is no {Path(folder, file)}, and no other .yaml file in {folder}: name another folder"
    near = nearest(name.removesuffix(".yaml"), known)
    hint = f"did you mean --config-name {near}? " if near else ""
    return f"there is no {Path(folder, file)}: {hint}the files of {folder} are {', '.join(known)}"


def _value_of(flags: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The value of a flag, which may have two names, among the arguments; None where it is not given."""
    for index, argument in enumerate(arguments):
        begin, has_value, value = argument.partition("=")
        if begin[:1] == "-" and full_flag(begin) in flags:
            return value if has_value else next(iter(arguments[index + 1 :]), None)
    return None


def _named_by_timm(option: str) -> str | None:
    """The words for a model of timm's, None for another name."""
    from timm import is_model

    return f"it is a model of timm; give model=timm model.name={option}" if is_model(option) else None


def _unknown_key(key: str, verb: str, arguments: Sequence[str]) -> str | None:
    """What is unknown in a dotted key, found by composing the configuration without that override."""
    if key.startswith("hydra."):
        return _unknown_to_hydra(key, verb, arguments)
    overrides = [argument for argument in arguments if "=" in argument or argument.startswith("~")]
    whole: Any = _compose_without(key, verb, overrides)
    if whole is None:
        return None
    node, place = whole, ""
    for part in key.split("."):
        if node is None:
            return f"{place} is null: give the whole of it, such as {place}={{{part}: VALUE}}"
        if not isinstance(node, Mapping):
            return f"{place} is one value and has no key {part}: give {place}=VALUE"
        if part not in node:
            return _unknown_part(key, part, place, node, whole, verb, overrides)
        node, place = node[part], f"{place}.{part}" if place else part
    if isinstance(node, Mapping):
        names = ", ".join(str(name) for name in node if name not in MARKS)
        if not names:
            return f"{place} has no options here: give +{place}.KEY=VALUE for each entry"
        return f"{place} has no options here: give {place}.KEY=VALUE, a KEY of {names}"
    return None


def _unknown_to_hydra(key: str, verb: str, arguments: Sequence[str]) -> str:
    """That a key of Hydra's own configuration, or one inside its value, is not there."""
    override = _override_of(key, arguments)
    told = f"{override}: Hydra has no such key here"
    if key.startswith("hydra.sweeper.") and not any(one.startswith("hparams_search=") for one in arguments):
        return f"{told}: give hparams_search=optuna, too, whose key it is"
    return f"{told}: `longseq {verb} --cfg hydra` lists its keys, and +{override} adds one"


def _unknown_part(
    key: str, part: str, place: str, node: Mapping[str, Any], whole: Mapping[str, Any], verb: str, overrides: list[str]
) -> str:
    """That `part` of a dotted key does not exist in `node`, with the key that may have been meant."""
    override = _override_of(key, overrides).lstrip("+")
    if told := _check_addition(key, verb, overrides):
        return told
    if place == "mixer.options" and (told := _part_of_a_hybrid(part, override, whole)):
        return told
    marks = MARKS if place else marks_at_top(whole)
    known = [str(name) for name in node if name not in marks]
    name = part.replace("-", "_")
    same = next((one for one in (name, SYNONYMS.get(name)) if one in known), None)
    elsewhere = _place_of(name, whole)
    if "." in key and (elsewhere or "").endswith(f".{key}"):
        elsewhere = None  # the same key as a value of longseq compare
    if nearest(name, known) and not (elsewhere or "").endswith(f".{name}"):
        elsewhere = None  # a misspelling of a key that stands here
    meant = f"{place}.{same}".lstrip(".") if same else elsewhere
    if _is_other(meant) and not place and verb == "train" and name in REMEDIES:
        return f"{override}: {part} is unknown: write {REMEDIES[name]}"
    if meant is None or part != key.rpartition(".")[2]:
        return unknown_key(part, known, place)
    names = ", ".join(known)
    value = override.partition("=")[2]
    return f"{key} is unknown: did you mean {meant}={value}? the keys{' of ' * bool(place)}{place} are {names}"


def _part_of_a_hybrid(part: str, override: str, whole: Mapping[str, Any]) -> str | None:
    """What helps where an option stands below the name of a mixer, as in a hybrid, and the files are of one mixer."""
    from longseq.mixers import mixer_names

    if part not in mixer_names():
        return None
    name = str((whole.get("mixer") or {}).get("name"))
    if name == part:
        return f"{override} is of a hybrid, and mixer={name} is one mixer: give {override.replace(f'.{part}', '', 1)}"
    hybrid = f"mixer=hybrid mixer.name={name}" if part in re.split(r"\W|(?<=\d)x", name) else "mixer=hybrid"
    return f"mixer.options.{part} is of a hybrid, and the options are of one mixer: give {hybrid} +{override}"


def _check_addition(key: str, verb: str, overrides: list[str]) -> str | None:
    """What helps if a command reads a key that the chosen files do not state; None if it does not read the key."""
    others = [one for one in overrides if _key_of(one) != key]
    given = next((one.lstrip("+") for one in overrides if _key_of(one) == key), "")
    addition = f"no chosen file states {key}: add it with a +, +{given}"
    if verb == "evaluate":  # which task the checkpoint is of, and so which keys, is not known before it is loaded
        return addition if given and key in _keys_of_any_data() else None
    known = "." in key and given and not key.startswith("hydra.")
    node = _compose_without("", verb, [*others, f"++{given}", "output=FOLDER"]) if known else None
    if node is None or "task" not in node:
        return None
    from longseq.tasks.command_keys import TrainKeys
    from longseq.tasks.experiment import check_experiment

    own = {entry.name for entry in fields(TrainKeys)}
    try:
        check_experiment({name: value for name, value in resolve(OmegaConf.create(node)).items() if name in own})
    except (ValueError, OmegaConfBaseException) as error:  # of this key's value, or of what else is wrong
        return str(error) if str(error).startswith(f"{key}=") else None
    return addition


def _keys_of_any_data() -> set[str]:
    """The keys of `data` that a task of this package or of a plug-in reads."""
    from longseq.tasks import registry

    return {f"data.{key.name}" for name in registry.names() for key in fields(registry.keys(name).data)}


def _compose_without(key: str, verb: str, overrides: Sequence[str]) -> Any:
    """The configuration without the overrides of a key, and of other unknown keys; None if that fails, too."""
    kept = [override for override in overrides if _key_of(override) != key]
    running = GlobalHydra.instance().hydra  # of a command that composes its runs
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONF, version_base="1.3"):
            return OmegaConf.to_container(compose(verb.replace(" ", "_"), kept), resolve=False)
    except HydraException as error:
        match = _NOT_THERE.match(str(error))
        return _compose_without(match["key"], verb, kept) if match and len(kept) < len(overrides) else None
    finally:
        GlobalHydra.instance().hydra = running


def _key_of(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _raised_by_resolver(error: BaseException) -> ValueError | None:
    """The user's mistake that one of our resolvers found; OmegaConf wraps it with the key that it was resolving."""
    origin = error.__context__
    while origin is not None and type(origin) is not ValueError:
        origin = origin.__context__
    return origin
