"""Run folders: where a run writes, and which earlier run a command continues."""

import json
import logging
import math
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from longseq.files import replacing
from longseq.tasks.data.info import Info
from longseq.tasks.training.automatic import as_chosen_before
from longseq.tasks.training.configuration import command_words, resolve, spell_value, with_absolute_root
from longseq.tasks.training.lock import is_locked
from longseq.tasks.training.processes import own_name

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"
MODEL_FOLDER = "model"

# Keys that a resumed run may change: what is printed, where and how fast, and on how many devices an effective batch is
# trained. None of them changes the order of samples.
FREE_KEYS = (
    "trainer.accumulate_grad_batches",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.log_every_n_steps",
    "resume",
    "output",
    "optimized_metric",
    "data.cache",
    "data.decode",
    "data.num_workers",
    "data.pin_memory",
    "callbacks.progress",
    "callbacks.telemetry",
    "callbacks.unreadable",
    "callbacks.samples",
    "callbacks.text_samples",
    "callbacks.worst",
    "callbacks.confusion",
    "logger",
    "load",  # in runs of earlier versions
    "learning_rate_finder",  # its result is in the checkpoint
    "recipe.chosen",
    "plugins",  # a checkpoint names those that its run used, a command those that it declares
)

# What models did before these were keys, where it is not nothing: checkpoints from before say nothing of them. The
# arguments of the models, of which each checkpoint tells all, are compared when its weights are read.
VALUES_BEFORE = {
    "model.direction": "forward",  # of token models
    "model.hashed_ngrams": 1,
    "model.ngram_buckets": 32768,
    "model.norm_eps": 1e-05,
    "model.norm_order": "pre",
}


# Keys that may differ from machine to machine of one run: places, and how data get from there to the device.
LOCAL_KEYS = (
    "resume",
    "output",
    "init",
    "plugins",
    "logger",
    "data.root",
    "data.train",
    "data.validation",
    "data.test",
    "data.cache",
    "data.num_workers",
    "data.pin_memory",
)

# Keys that a file of `trainer` sets for its hardware, and a run keeps to its end unless a command gives them by hand.
KEPT_KEYS = ("trainer.log_every_n_steps", "trainer.precision")

# Keys of a run's end, which a schedule with a constant rate does not depend on before its decay.
LENGTH_KEYS = (
    "recipe.epochs",
    "recipe.updates",
    "recipe.tokens",
    "recipe.schedule.decay_epochs",
    "recipe.schedule.decay_fn",
    "recipe.schedule.min_lr",
)
_SCHEDULE = "recipe.schedule.sched"
_ROOT = "data.root"
_ACCUMULATE = "trainer.accumulate_grad_batches"
_LIMIT = "trainer.limit_train_batches"

# The folders of this command, by the names that it wanted: Hydra resolves a name several times.
_OWN: dict[str, str] = {}


def run_folder(fresh: str, *, _root_: DictConfig) -> str:
    """Resolver `${run_folder:FRESH}` of hydra.run.dir: FRESH, or with `resume` the folder of the run to continue.

    A run that continues a checkpoint to another end has a folder of its own.
    """
    resume = OmegaConf.select(_root_, "resume")
    if not resume:
        return _own(fresh)
    config: Any = OmegaConf.to_container(OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"]))
    wanted = resolve(OmegaConf.create({**config, "output": fresh}))
    if resume is not True:
        saved = saved_config(Path(resume))
        if saved is not None:
            wanted = as_begun(wanted, saved, OmegaConf.select(_root_, "hydra.overrides.task"))
            ends_elsewhere = bool(differences(saved, wanted, another_accelerator=True))
            if ends_elsewhere and not differences(saved, wanted, another_accelerator=True, another_length=True):
                return _own(fresh)
        return str(_checkpoint_run(Path(resume)) or _own(fresh))
    return str(_newest_run(Path(fresh).parent, wanted) or _own(fresh))


def _own(fresh: str) -> str:
    """The folder `fresh`, or FRESH_2 and so on where another command that began in the same second has made it."""
    if fresh not in _OWN:
        names = (fresh if number == 1 else f"{fresh}_{number}" for number in count(1))
        _OWN[fresh] = next(name for name in names if not Path(name).exists())
    return _OWN[fresh]


def forget_folders() -> None:
    """The end of a command: another one in this process has folders of its own."""
    _OWN.clear()


OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)


def checkpoint_to_resume(config: Mapping[str, Any]) -> Path | None:
    """The checkpoint from which `config.resume` continues; None for a new run.

    ValueError for a missing file, or for a checkpoint of another configuration: the message names the keys.
    """
    resume, folder = config["resume"], Path(config["output"])
    if (own := folder / "checkpoints" / "last.ckpt").is_dir():
        raise ValueError(
            f"{own} is a folder, and the run writes its checkpoint there: remove it, or give another output"
        )
    if not resume:
        if newest_checkpoint(folder) is not None:
            raise ValueError(f"{folder} holds a run already; continue it with resume=true, or choose another output")
        return None
    path = newest_checkpoint(folder) if resume is True else Path(resume)
    if path is None:
        return None
    if path.is_dir():
        last = next(
            (place for place in (newest_checkpoint(path), path / "last.ckpt") if place and place.is_file()), None
        )
        told = f"give resume={last}" if last is not None else "give a .ckpt file, or resume=true for the newest"
        raise ValueError(f"resume={resume} is a folder, and a run goes on from a checkpoint: {told}")
    if not path.is_file():
        raise ValueError(
            f"resume={resume}: there is no such checkpoint; give a .ckpt file, or resume=true for the newest"
        )
    content = _read(path)
    if not content or (own_name() is None and _is_changed(path)):  # one process of a run checks it for all
        raise ValueError(f"{path} cannot be read: it is damaged, or no checkpoint; give another one by resume=FILE")
    saved = _config_of(content)
    if saved is None:
        raise ValueError(
            f"{path} is not a checkpoint of `longseq train`; give one below outputs/, continue a program's own run by "
            f"trainer.fit(..., ckpt_path={path.name!r}), or begin a run with its weights by init={path}"
        )
    if missing := _missing_in(content):
        raise ValueError(
            f"{path} lacks {missing}, without which the run would not go on as it was: it was changed after it was "
            f"written; give another checkpoint, or begin a run with its weights by init={path}"
        )
    named = resume is not True
    wanted = as_begun(config, saved, command_words()) if named else config
    changed = differences(saved, wanted, another_accelerator=named, another_length=named)
    if changed:
        shown = "; ".join(f"{key}: {old!r} there, {new!r} here" for key, old, new in changed[:5])
        shown += f"; and {len(changed) - 5} more keys" if len(changed) > 5 else ""
        then, now = (_accumulated(dict(flatten(each))) for each in (saved, wanted))
        if then != now and any(key == _LIMIT for key, _, _ in changed):
            shown += f"; a limit counts batches, and an update has {now} here in place of {then}"
        raise ValueError(
            f"{path} was trained with another configuration ({shown}); {_remedy(changed, saved, wanted, path)}"
        )
    return path


def _remedy(
    changed: list[tuple[str, Any, Any]], saved: Mapping[str, Any], config: Mapping[str, Any], path: Path
) -> str:
    """What to type where a checkpoint has another configuration: the keys, if they are few and no group is another."""
    old, new = dict(flatten(saved)), dict(flatten(config))
    if any(key not in old or key not in new for key, _, _ in changed):
        return (
            "repeat that run's own overrides; if its longseq had other keys, go on with that one, or begin a run with "
            f"its weights by init={path}"
        )
    if len(changed) > 5 or any(key.endswith(".name") for key, _, _ in changed):
        return "repeat that run's own overrides, or start anew without resume"
    there = {**old, _LIMIT: _find_limit(old, new)}
    words = " ".join(f"{key}={spell_value(there[key])}" for key, _, _ in changed)
    return f"give {words}, or start anew without resume"


def _missing_in(content: Mapping[str, Any]) -> str | None:
    """The part that a checkpoint of a run has lost; None if it is whole. A model without gradients has no optimizer."""
    needed = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step")
    missing = next((name for name in needed if name not in content), None)
    if missing is not None:
        return missing
    emptied = bool(content["lr_schedulers"]) and not content["optimizer_states"]
    return "optimizer_states" if emptied else None if content["loops"] else "loops"


def differences(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    another_accelerator: bool = False,
    another_length: bool = False,
) -> list[tuple[str, Any, Any]]:
    """The keys, with both values, whose difference prevents a resumed run from repeating the first.

    `another_accelerator`: a run whose checkpoint is named may go on on other hardware.
    `another_length`: a run whose learning rate is constant up to its decay (wsd) may get another end and another decay;
    the module refuses a checkpoint of the decay. What the first run chose by itself is also the
    second's.
    """
    old, new = _inside_the_run(saved), _inside_the_run(as_chosen_before(config, saved))
    free: tuple[str, ...] = LENGTH_KEYS if another_length and old.get(_SCHEDULE) == new.get(_SCHEDULE) == "wsd" else ()
    free += ("trainer.accelerator",) if another_accelerator else ()
    keys = [key for key in sorted(old.keys() | new.keys()) if not _is_free(key) and key not in free]
    return [(key, old.get(key), new.get(key)) for key in keys if not _alike(key, old, new)]


def _alike(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True for equal values, and for a key that one configuration does not know, and that does nothing in the other, or
    what was done before it was a key.
    """
    if key == _LIMIT and _accumulated(old) != _accumulated(new):
        # a part of an epoch in place of a number: `refuse_other_epoch` counts the updates when the data are open
        return isinstance(old.get(key), float) or bool(_find_limit(old, new) == new.get(key))
    if key in old and key in new:
        return bool(old[key] == new[key]) or (key == _ROOT and _has_moved(old[key], new[key]))
    value = old.get(key, new.get(key))
    if key in VALUES_BEFORE and key not in old and value == VALUES_BEFORE[key]:
        return True
    return value is None or value is False or value in ("none", [], {})


def _find_limit(old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """The limit of an epoch in batches of the new configuration that has the updates of the old one's."""
    limit = old.get(_LIMIT)
    return math.ceil(limit * _accumulated(new) / _accumulated(old)) if isinstance(limit, int) else limit


def _accumulated(config: Mapping[str, Any]) -> int:
    """The batches that a device accumulates for an update, in a flat configuration."""
    return int(config.get(_ACCUMULATE, 1))


def _has_moved(old: Any, new: Any) -> bool:
    """True if the folder of the data is gone, and a folder of the same name is given in its place."""
    paths = (old, new)
    if not all(isinstance(path, str) and os.path.isabs(path) for path in paths):
        return False
    return Path(old).name == Path(new).name and not Path(old).exists()


def finished(folder: Path) -> dict[str, Any] | None:
    """The metrics of a finished run; None for an unfinished one."""
    path = folder / METRICS_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _inside_the_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat configuration, with paths below the run folder as if all runs had the same folder."""
    folder = str(config["output"])

    def told(value: Any) -> Any:
        below = isinstance(value, str) and (value == folder or value.startswith(f"{folder}/"))
        return f"OUTPUT{value.removeprefix(folder)}" if below else value

    return {key: told(value) for key, value in flatten(with_absolute_root(config))}


def shared_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat configuration that all processes of a run have in common."""
    return {key: value for key, value in _inside_the_run(config).items() if not _is_below(key, LOCAL_KEYS)}


def newest_other_run(config: Mapping[str, Any]) -> tuple[Path, list[str]] | None:
    """The newest run beside `config.output` with another configuration, and the keys that differ."""
    for folder, saved in _runs(Path(config["output"]).parent):
        changed = [key for key, _, _ in differences(saved, config)]
        if changed:
            return folder, changed
    return None


def _newest_run(parent: Path, config: Mapping[str, Any]) -> Path | None:
    """The newest unfinished run with this configuration, preferably one that no other process continues.

    Without an unfinished run, the newest finished one; None without any.
    """
    same = [folder for folder, saved in _runs(parent) if not differences(saved, config)]
    unfinished = [folder for folder in same if finished(folder) is None]
    free = (folder for folder in unfinished if not is_locked(folder))
    return next(iter([*free, *unfinished, *same]), None)


def _runs(parent: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folders below `parent` with a checkpoint, newest first, and their configurations; other folders are ignored."""
    found = []
    for path in parent.glob(f"*/{CONFIG_FILE}"):
        checkpoint = newest_checkpoint(path.parent)
        if checkpoint is None:
            continue
        content = _read(checkpoint)
        if not content:
            _log.warning("%s cannot be read, and its run is passed over: it is damaged, or no checkpoint", checkpoint)
        # Not config.yaml: it holds the values that the model chose where the command left them open.
        saved = _config_of(content)
        if isinstance(saved, Mapping) and "output" in saved:
            found.append((checkpoint.stat().st_mtime, path.parent, saved))
    return [(folder, dict(saved)) for _, folder, saved in sorted(found, key=lambda run: run[0], reverse=True)]


def newest_checkpoint(folder: Path) -> Path | None:
    path = folder / "checkpoints" / "last.ckpt"
    return path if path.is_file() else None


def chosen_in(checkpoint: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the values that the run of a checkpoint chose, where it leaves the choice to the run."""
    saved = saved_config(checkpoint) or {}
    return as_begun(as_chosen_before(config, saved), saved, command_words())


def as_begun(config: Mapping[str, Any], saved: Mapping[str, Any], words: Sequence[str] | None) -> dict[str, Any]:
    """The configuration with an earlier run's values of KEPT_KEYS, where the words of a command do not give them.

    `saved` is the configuration of that run. A configuration without a command (None) stays as it is: nobody can tell
    what was given by hand.
    """
    earlier = saved.get("trainer")
    if words is None or not isinstance(earlier, Mapping):
        return dict(config)
    given = {word.lstrip("+~").partition("=")[0] for word in words}
    kept = [key.removeprefix("trainer.") for key in KEPT_KEYS if key not in given]
    return {**config, "trainer": {**config["trainer"], **{name: earlier[name] for name in kept if name in earlier}}}


def contents_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds; nothing for a file that cannot be read."""
    return _read(checkpoint)


def updates_of(checkpoint: Path) -> int:
    """The number of updates after which a checkpoint was written."""
    return _read(checkpoint).get("global_step", 0)


def saved_config(checkpoint: Path) -> dict[str, Any] | None:
    return _config_of(_read(checkpoint))


def _config_of(content: Mapping[str, Any]) -> dict[str, Any] | None:
    return content.get("hyper_parameters", {}).get("config")


def trained_on(checkpoint: Path, info: Info) -> Info | None:
    """What the run of a checkpoint knew of its data, in the class of `info`; None of a run that knew less."""
    try:
        return type(info).from_dict(_read(checkpoint).get("hyper_parameters", {}).get("data") or {})
    except ValueError:
        return None


def check_data(checkpoint: Path, info: Info, files: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError, in one line, if a run would go on with data of another meaning than those of its checkpoint.

    Other samples of the same meaning are told by a warning, as are `files` of a split that are newer than the
    checkpoint. In the middle of an epoch the loader refuses another number of training samples.
    """
    if (trained := trained_on(checkpoint, info)) is None:
        return
    if (change := info.find_other_meaning(trained)) is not None:
        raise ValueError(
            f"{checkpoint} was trained on other data: {change}; restore the data, or begin a new run with its weights "
            f"by init={checkpoint}"
        )
    told: list[str] = []
    for split in ("train", "val", "test"):
        if (change := info.find_change(trained, split)) is not None:
            _log.warning("the data have changed: %s", change)
        elif newer := _count_newer(checkpoint, files.get(split, ())):
            told.append(f"{newer} of {len(files[split])} files of {split}")
    if told:
        _log.warning(
            "newer than %s: %s; if their content has changed, the run goes on with other data than it began with",
            checkpoint,
            ", ".join(told),
        )


def _count_newer(checkpoint: Path, files: Sequence[str]) -> int:
    """The number of files that are newer than a checkpoint; 0 if all are, as in a later copy of the whole."""
    written = checkpoint.stat().st_mtime_ns
    newer = sum(_is_newer(path, written) for path in files)
    return newer if newer < len(files) else 0


def _is_newer(path: str, written: int) -> bool:
    try:
        return os.stat(path).st_mtime_ns > written
    except OSError:
        return False  # the loader tells what cannot be read


def bring_best(checkpoint: Path, folder: Path) -> None:
    """Copy the best checkpoint beside `checkpoint` into the other folder where its run goes on, if it fits."""
    best, own = checkpoint.with_name("best.ckpt"), folder / "checkpoints" / "best.ckpt"
    if own.exists() or not best.is_file() or best.resolve() == own.resolve():
        return
    if _best_score(checkpoint) == _best_score(best):
        own.parent.mkdir(parents=True, exist_ok=True)
        with replacing(own) as partial:
            shutil.copyfile(best, partial)
    else:
        _log.warning("%s is not the best of the run up to %s: the best one is sought from here on", best, checkpoint)


def _best_score(checkpoint: Path) -> float | None:
    """The best score of a run when a checkpoint of it was written."""
    states = _read(checkpoint).get("callbacks", {}).items()
    score = next((state.get("best_model_score") for name, state in states if name.startswith("BestCheckpoint")), None)
    return None if score is None else float(score)


def _read(checkpoint: Path) -> dict[str, Any]:
    import torch  # the resolvers of this module, which `--help` needs, do without it

    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def is_readable(checkpoint: Path) -> bool:
    """True for a file that is a checkpoint as far as `torch.load` can tell."""
    return bool(_read(checkpoint))


def _is_changed(checkpoint: Path) -> bool:
    """True if the sums in a checkpoint tell of other bytes than it has; `torch.load` does not look at them."""
    if not zipfile.is_zipfile(checkpoint):
        return False
    try:
        with zipfile.ZipFile(checkpoint) as parts:
            return parts.testzip() is not None
    except (zipfile.BadZipFile, OSError):
        return True


def _checkpoint_run(checkpoint: Path) -> Path | None:
    folder = checkpoint.resolve().parent.parent
    return folder if (folder / CONFIG_FILE).is_file() else None


def _is_free(key: str) -> bool:
    return _is_below(key, FREE_KEYS)


def _is_below(key: str, places: Iterable[str]) -> bool:
    """True for one of these keys, or a key of such a group."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested configuration."""
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config
