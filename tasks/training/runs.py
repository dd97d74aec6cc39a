"""Run folders: where a run writes, its lock, and which earlier run a command continues."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from longseq.tasks.config import UNITS
from longseq.tasks.data.info import Info
from longseq.tasks.registry import read_experiment
from longseq.tasks.training.automatic import as_chosen_before
from longseq.tasks.training.configuration import flatten, refer, resolve, with_absolute_root

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"
MODEL_FOLDER = "model"
LOCK_FILE = "run.lock"

# Data workers of a killed process hold its lock until they end.
_PATIENCE = 5.0  # seconds

# Keys that a resumed run may change, since they do not change its numbers.
FREE_KEYS = (
    *(f"trainer.{key}" for key in ("accumulate_grad_batches", "devices", "num_nodes", "strategy", "log_every_n_steps")),
    *(f"data.{key}" for key in ("cache", "decode", "num_workers", "pin_memory")),
    *("resume", "output", "optimized_metric", "callbacks.progress", "logger", "recipe.chosen"),
    "learning_rate_finder",  # its result is in the checkpoint
    "plugins",  # a checkpoint names the used ones, a command the declared ones
)

# Keys of a run's end. A schedule with a constant rate (wsd) does not depend on them before its decay.
LENGTH_KEYS = (
    *(f"recipe.{unit}" for unit in UNITS),
    *(f"recipe.schedule.{key}" for key in ("decay_epochs", "decay_fn", "min_lr")),
)


def run_folder(fresh: str, *, _root_: DictConfig) -> str:
    """Resolver `${run_folder:FRESH}` of hydra.run.dir: FRESH, or with `resume` the folder of the run to continue.

    A run that continues a checkpoint to another end has a folder of its own.
    """
    resume = OmegaConf.select(_root_, "resume")
    if not resume:
        return own_folder(fresh)
    config: Any = OmegaConf.to_container(OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"]))
    wanted = read_experiment(resolve(OmegaConf.create({**config, "output": fresh})))
    if resume is True:
        return str(_newest_run(Path(fresh).parent, wanted) or own_folder(fresh))
    saved = saved_config(Path(resume)) or {}
    changed = {key for key, _, _ in differences(saved, wanted)} if saved else set()
    folder = Path(resume).resolve().parent.parent
    ends_elsewhere = bool(changed & {*LENGTH_KEYS}) and not differences(saved, wanted, named=True)
    return str(folder) if (folder / CONFIG_FILE).is_file() and not ends_elsewhere else own_folder(fresh)


@cache  # Hydra resolves a name several times
def own_folder(fresh: str) -> str:
    """The folder `fresh`, or FRESH_2 and so on if another command has made it in the same second."""
    names = chain([fresh], (f"{fresh}_{number}" for number in count(2)))
    return next(name for name in names if not Path(name).exists())


OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)


def checkpoint_to_resume(config: Mapping[str, Any]) -> Path | None:
    """The checkpoint from which `config.resume` continues; None for a new run.

    ValueError for a checkpoint of another configuration, and for a new run in the folder of another one.
    """
    resume, folder = config["resume"], Path(config["output"])
    newest = newest_checkpoint(folder)
    if not resume:
        if newest is not None:
            raise ValueError(f"{folder} holds a run already: give resume=true, or another output")
        return None
    named = resume is not True
    path = Path(resume) if named else newest
    if path is None:
        return None
    saved = saved_config(path)
    if saved is None:
        raise ValueError(f"{path} is not a checkpoint of `longseq train`")
    if changed := differences(saved, config, named=named):
        shown = "; ".join(f"{key}: {old!r} there, {new!r} here" for key, old, new in changed[:5])
        raise ValueError(f"{path} was trained with another configuration ({shown})")
    return path


def differences(
    saved: Mapping[str, Any], config: Mapping[str, Any], *, named: bool = False
) -> list[tuple[str, Any, Any]]:
    """The keys, with both values, that make a resumed run different from the run of the checkpoint.

    A command that names the checkpoint (`named`) may change the accelerator, and the end of a run with a constant rate
    (wsd); the module refuses a checkpoint from within the decay.
    """
    old, new = _inside_the_run(saved), _inside_the_run(as_chosen_before(config, saved))
    free: tuple[str, ...] = FREE_KEYS
    if named:
        free += ("trainer.accelerator",)
        schedules = {config.get("recipe.schedule.sched") for config in (old, new)}
        free += LENGTH_KEYS if schedules == {"wsd"} else ()
    groups = tuple(f"{key}." for key in free)
    keys = [key for key in sorted(old.keys() | new.keys()) if not f"{key}.".startswith(groups)]
    if new.get("trainer.limit_train_batches") is not None:  # it counts batches, and an epoch would have other updates
        keys.append("trainer.accumulate_grad_batches")
    roots: list[Any] = [config.get("data.root") for config in (old, new)]
    before, now = roots
    if all(isinstance(root, str) and os.path.isabs(root) for root in roots) and not Path(before).exists():
        old["data.root"] = now if Path(before).name == Path(now).name else before  # the folder may have moved
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def finished(folder: Path) -> dict[str, Any] | None:
    """The metrics of a finished run; None for an unfinished one."""
    path = folder / METRICS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _inside_the_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat configuration, with a common name for the run folder in all paths."""
    return dict(flatten(refer(with_absolute_root(config), str(config["output"]))))


def _newest_run(parent: Path, config: Mapping[str, Any]) -> Path | None:
    """The newest unfinished run with this configuration, else the newest finished one."""
    found = []
    for path in parent.glob(f"*/{CONFIG_FILE}"):
        checkpoint = newest_checkpoint(path.parent)
        if checkpoint is not None:
            saved: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
            if "output" in saved and not differences(saved, config):
                found.append((finished(path.parent) is None, checkpoint.stat().st_mtime, path.parent))
    return max(found)[-1] if found else None


def newest_checkpoint(folder: Path) -> Path | None:
    path = folder / "checkpoints" / "last.ckpt"
    return path if path.is_file() else None


def contents_of(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint, read without unpickling code."""
    content: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    return content


def saved_config(checkpoint: Path) -> dict[str, Any] | None:
    """The configuration of the run that wrote a checkpoint; None for one of another program."""
    config: dict[str, Any] | None = contents_of(checkpoint).get("hyper_parameters", {}).get("config")
    return config


def check_data(checkpoint: Path, info: Info) -> None:
    """ValueError if a run would go on with data of another meaning, such as other classes; warns of other samples."""
    trained = type(info).from_dict(contents_of(checkpoint)["hyper_parameters"]["data"])
    if (change := info.find_other_meaning(trained)) is not None:
        raise ValueError(f"{checkpoint} was trained on other data: {change}")
    for split in ("train", "val", "test"):
        if (change := info.find_change(trained, split)) is not None:
            _log.warning("the data have changed: %s", change)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which the system releases when the process ends.

    ValueError if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    try:
        with FileLock(path, timeout=_PATIENCE):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except Timeout:
        raise ValueError(f"another process is writing to {folder}") from None
