"""The runs that a comparison finds in its folder: the configuration and the data that they were trained with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from longseq.tasks import registry
from longseq.tasks.circumstances import find_circumstances
from longseq.tasks.data.info import Info
from longseq.tasks.report import shorten
from longseq.tasks.training import runs
from longseq.tasks.training.files import write_text
from longseq.version import installed_version

MEASURED_FILE = "measured.json"  # the commit, the hardware and the versions of a run
# Keys of MEASURED_FILE that tell whether a run may be taken again; the results do not have them.
_VERSION, _PLACE = "longseq", "started_in"

# Keys that a resumed run must keep, and that no result depends on.
WITHOUT_EFFECT = ("callbacks.checkpoint", "callbacks.throughput")
# Keys of files that a run records as they were given, also where they begin at the working folder.
_FILES = ("init", "data.tokenizer")
_FILES_WITHOUT_ROOT = ("data.train", "data.validation", "data.test")
_ROOT = "data.root"
# Where config.yaml has the values of the model in place of null.
_FILLED = ("model.", "mixer.options.")

Difference = tuple[str, Any, Any]


class Earlier(NamedTuple):
    """A run of an earlier command that this command would take as it is, or continue.

    Args:
        is_filled: `config` has the values of the model in place of null.
        is_same_version: the sources of the run are those of this command, so that both know the same keys.
        place: the working folder of the command; None for a run of a version that did not record it.
    """

    config: dict[str, Any]
    is_filled: bool
    is_same_version: bool
    place: str | None


def record_measured(folder: Path, device: torch.device) -> None:
    """Write the circumstances of a run that begins, and what tells later whether it may be taken again."""
    found = find_circumstances(device) | {_VERSION: installed_version(), _PLACE: os.getcwd()}
    write_text(folder / MEASURED_FILE, json.dumps(found) + "\n")


def read_measured(folder: Path) -> dict[str, Any] | None:
    """The circumstances of a run, as the results have them; None if they are not known."""
    found = _measured(folder)
    return {key: value for key, value in found.items() if key not in (_VERSION, _PLACE)} or None


def _measured(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return json.loads((folder / MEASURED_FILE).read_text(encoding="utf-8"))
    return {}


def finished(folder: Path) -> dict[str, Any] | None:
    """The metrics of a finished run; None for one that is unfinished, or that has trained nothing."""
    return None if is_untrained(folder) else runs.finished(folder)


def is_untrained(folder: Path) -> bool:
    """True for a run that ended without an update: its metrics are those of the first weights.

    A model that a run fits without gradients may need none.
    """
    if (runs.finished(folder) or {}).get("updates") != 0:
        return False
    content = runs.contents_of(checkpoint) if (checkpoint := runs.newest_checkpoint(folder)) is not None else {}
    return bool(content.get("optimizer_states", [{}]))


def refuse_others(planned: Iterable[tuple[Path, Mapping[str, Any]]], commit: str | None) -> None:
    """Raise ValueError, in one line, if a run folder holds a run of another configuration than the one planned there.

    The name of the folder tells the words of the command only. The same words mean another run if a file of
    configuration was edited, or if a path begins at another working folder.
    """
    others = [
        (folder, found)
        for folder, config in planned
        if (earlier := _find_earlier(folder, commit)) and (found := find_differences(earlier, config))
    ]
    if not others:
        return
    folder, found = others[0]
    shown = "; ".join(f"{key}: {old!r} there, {new!r} here" for key, old, new in found[:3])
    shown += f"; and {len(found) - 3} more keys" if len(found) > 3 else ""
    more = f", and so were {len(others) - 1} other run(s) of this command" if len(others) > 1 else ""
    which = "these folders" if more else "that folder"
    raise ValueError(
        f"{shorten(folder)} was trained with another configuration ({shown}){more}: give another output=FOLDER, or "
        f"remove {which} to train anew"
    )


def _find_earlier(folder: Path, commit: str | None) -> Earlier | None:
    """The run in a folder; None if the folder holds neither a finished run nor a checkpoint to continue."""
    checkpoint, is_filled = runs.newest_checkpoint(folder), False
    config = runs.saved_config(checkpoint) if checkpoint is not None else None
    if config is None and runs.finished(folder) is not None:
        config, is_filled = _read_config(folder / runs.CONFIG_FILE), True
    if not isinstance(config, Mapping) or "output" not in config:
        return None
    measured = _measured(folder)
    is_same = measured.get(_VERSION) == installed_version() and measured.get("commit") == commit
    return Earlier(dict(config), is_filled, is_same, measured.get(_PLACE))


def _read_config(path: Path) -> Any:
    """The configuration that a run has saved; None without one that can be read."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None


def find_differences(earlier: Earlier, config: Mapping[str, Any]) -> list[Difference]:
    """The keys, with both values, by which a planned run would have another result than an earlier one.

    What `resume` takes for the same run is the same here. Versions may have other keys: a key that only one of two
    versions knows is no difference.
    """
    old, new = (dict(runs.flatten(one)) for one in (earlier.config, config))
    found = [
        (key, before, now)
        for key, before, now in runs.differences(earlier.config, config)
        if not any(key == place or key.startswith(f"{place}.") for place in WITHOUT_EFFECT)
        and (earlier.is_same_version or (_knows(old, key) and _knows(new, key)))
        and not (earlier.is_filled and now is None and key.startswith(_FILLED))
        and not (key == _ROOT and _is_absent(before, now))
    ]
    return [*found, *_other_files(earlier, new)]


def _knows(flat: Mapping[str, Any], key: str) -> bool:
    """True if a flat configuration has the key, or a value such as null in place of the group that the key is in."""
    parts = key.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return key in flat or any(place in flat and flat[place] != {} for place in above)


def _is_absent(before: Any, now: Any) -> bool:
    """True if a folder of data is not here, and may be that of the run: finished runs do not need their data."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(one == other or _is_absent(one, other) for one, other in zip(before, now, strict=True))
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    return not os.path.isabs(now) and not os.path.exists(now) and Path(before).name == Path(now).name


def _other_files(earlier: Earlier, new: Mapping[str, Any]) -> Iterator[Difference]:
    """The files that have the same relative path as those of a run, and begin at another working folder."""
    old = dict(runs.flatten(earlier.config))
    for key in (*_FILES, *(() if new.get(_ROOT) else _FILES_WITHOUT_ROOT)):
        value = new.get(key)
        if earlier.place is None or not isinstance(value, str) or value != old.get(key) or os.path.isabs(value):
            continue
        there, here = os.path.join(earlier.place, value), os.path.abspath(value)
        if os.path.exists(there) and os.path.exists(here) and not os.path.samefile(there, here):
            yield key, there, here


class Trained(NamedTuple):
    """What a run knew of its data. Runs with the same `keys` read the same data, if these have not changed."""

    folder: Path
    time: float
    keys: str
    info: Info


def find_trained(folder: Path, config: Mapping[str, Any]) -> list[Trained]:
    """What the checkpoint of a run tells of its data; nothing without a checkpoint."""
    checkpoint, task = runs.newest_checkpoint(folder), registry.of(config)
    if checkpoint is None:
        return []
    told = runs.contents_of(checkpoint).get("hyper_parameters", {}).get("data")
    try:
        info = task.data.info_class.from_dict(told or {})
    except ValueError:
        return []
    keys = {key: value for key, value in runs.shared_keys(config).items() if key.startswith(("data.", "task."))}
    # `shared_keys` leaves out the places of the data, which differ between the processes of a run on several machines.
    places = {key: config["data"].get(key) for key in ("root", "train", "validation", "test")}
    return [Trained(folder, checkpoint.stat().st_mtime, json.dumps([keys, places], default=str), info)]


def find_other_data(trained: Sequence[Trained]) -> str | None:
    """In words, how the data of two runs differ that should have read the same; None if none are known to differ."""
    first: dict[str, Trained] = {}
    for run in sorted(trained, key=lambda one: one.time):
        before = first.setdefault(run.keys, run)
        if (change := _find_change(before, run)) is not None:
            return f"the data have changed between the runs: {change}; another output=FOLDER trains all of them anew"
    return None


def _find_change(before: Trained, run: Trained) -> str | None:
    then, now = before.info, run.info
    first, later = shorten(before.folder), run.folder.name
    for split in ("train", "val", "test"):
        if now.find_change(then, split) is None:
            continue
        sizes = then.sizes.get(split), now.sizes.get(split)
        if None in sizes or sizes[0] == sizes[1]:
            return f"{split} has other samples in {later} than in {first}"
        return f"{split} has {sizes[0]} samples in {first}, and {sizes[1]} in {later}"
    if now.find_other_meaning(then) is not None:
        return f"classes or tokens have other numbers in {later} than in {first}"
    return None
