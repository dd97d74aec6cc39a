"""The one loader of checkpoints that `longseq train` writes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn

from longseq.mixers import check_revisions
from longseq.tasks import registry
from longseq.tasks.image.model import takes_any_resolution
from longseq.tasks.training.module import REVISIONS

__all__ = ["Loaded", "load", "read", "sha256"]

WEIGHTS = ("auto", "ema", "model")

# What this loader reads of a configuration.
CONFIG_KEYS = ("model", "mixer", "scale", "recipe", "seed")

# Options of timm's models that name files of weights.
WEIGHT_OPTIONS = ("pretrained", "checkpoint_path", "cache_dir")

# Where the task keeps its model, and Lightning's weight averaging the weights that it has averaged.
BACKBONE_PREFIX = "backbone."
RAW_WEIGHTS = "current_model_state"


@dataclass(frozen=True)
class Loaded:
    """A trained backbone in eval mode and what its checkpoint knows.

    `config` is the resolved configuration of the run, `data` what its model had to know of its data (for images
    class_names, num_classes, img_size, in_chans, mean, std, interpolation, crop_pct; for a probe see `ProbeInfo`);
    `weights` says which were taken: "ema" or "model".
    """

    path: Path
    backbone: nn.Module
    task_name: str
    config: dict[str, Any]
    data: dict[str, Any]
    weights: str
    epoch: int
    global_step: int


def load(
    path: str | Path,
    weights: str = "auto",
    map_location: str | torch.device = "cpu",
    model_options: Mapping[str, Any] = MappingProxyType({}),
    any_resolution: bool = False,
    key: str = "checkpoint",
    tasks: Collection[str] = ("image",),
) -> Loaded:
    """Rebuild the model of a checkpoint and load its weights; the caller's random state stays as it is.

    `model_options` replace options of the model that do not change its weights, such as dynamic_img_size or backend.
    With `any_resolution` the model takes images of other sizes than it was trained at: positions are resized to them.
    `key` is the name under which the user gave the file, `tasks` are those whose checkpoints the caller can use.

    `weights` is "ema" (the average of the weights), "model" (the weights themselves) or "auto": the average where the
    run kept one. Raises ValueError, in one line, where there is no such file, where it is none of our checkpoints or
    damaged, where it is of another task, where its weights do not fit the model that its configuration describes, and
    where a layer has come to compute something else of its weights.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights} is unknown: take one of {', '.join(WEIGHTS)}")
    checkpoint = read(path, key)
    config, data = checkpoint["hyper_parameters"]["config"], checkpoint["hyper_parameters"]["data"]
    task = _task(config, tasks, path, key)
    _check_class_names(data, path, key)
    averaged = RAW_WEIGHTS in checkpoint
    if weights == "ema" and not averaged:
        raise ValueError(
            f"{path} holds no averaged weights: take weights=model, or train with an average of the weights"
        )
    taken = "ema" if averaged and weights != "model" else "model"
    state = checkpoint[RAW_WEIGHTS if averaged and taken == "model" else "state_dict"]
    backbone = _build(config, data, model_options, path, key)
    try:
        check_revisions(backbone, checkpoint.get(REVISIONS))
    except ValueError as error:
        raise ValueError(f"{key}={path}: {error}") from error
    if any_resolution and not takes_any_resolution(backbone):
        try:
            backbone = _build(config, data, {**model_options, "dynamic_img_size": True}, path, key)
        except ValueError as error:
            raise ValueError(
                f"{key}={path} holds a {config['model']['name']}, which takes images of {data['img_size']} px only"
            ) from error
    _fill(backbone, state, path)
    return Loaded(
        path=Path(path),
        backbone=backbone.to(map_location).eval(),
        task_name=task,
        config=config,
        data=data,
        weights=taken,
        epoch=checkpoint.get("epoch", 0),
        global_step=checkpoint.get("global_step", 0),
    )


def read(path: str | Path, key: str = "checkpoint") -> dict[str, Any]:
    """The contents of a checkpoint of ours on the CPU, or a ValueError that says what the file is instead."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{key}={path} is a folder: name a file in it, such as {_example(file)}")
    if not file.is_file():
        raise ValueError(
            f"{key}={path}: no such file; `longseq train` writes checkpoints/best.ckpt in its output folder"
        )
    if not _is_whole(file):
        raise ValueError(
            f"{key}={path} is damaged, cut short or no checkpoint: take another one of the run, such as last.ckpt"
        )
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{key}={path} is no checkpoint of longseq: it holds other things than tensors and plain containers; "
            "name a file that `longseq train` wrote"
        ) from error
    _require_ours(checkpoint, path, key)
    return checkpoint


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _is_whole(file: Path) -> bool:
    """Whether every part of the archive has its checksum, which torch.load does not look at."""
    try:
        with ZipFile(file) as archive:
            return archive.testzip() is None
    except (BadZipFile, EOFError):
        return False


def _task(config: Mapping[str, Any], tasks: Collection[str], path: str | Path, key: str) -> str:
    """The task of the run, which must be one of `tasks`."""
    task = (config.get("task") or {}).get("name")
    if task is not None and task not in tasks:
        taken = " or ".join(f"task={name}" for name in tasks)
        raise ValueError(f"{key}={path} belongs to task={task}; this command takes checkpoints of {taken}")
    if missing := [name for name in ("task", *CONFIG_KEYS) if config.get(name) is None]:
        raise ValueError(_of_another_version(path, key, missing))
    assert task is not None
    return task


def _check_class_names(data: Mapping[str, Any], path: str | Path, key: str) -> None:
    names, classes = data.get("class_names"), data.get("num_classes")
    if names is not None and len(names) != classes:
        raise ValueError(f"{key}={path} is damaged: it names {len(names)} classes, and its model has {classes}")


def _build(
    config: Mapping[str, Any], data: Mapping[str, Any], options: Mapping[str, Any], path: str | Path, key: str
) -> nn.Module:
    config = _as_of_today(config)
    model = {**_without_files(config["model"]), **options}
    recipe = {**config["recipe"], "model": _without_files(config["recipe"].get("model") or {})}
    # The weights are replaced: what drawing them takes from the generators is given back.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            task = registry.of(config)
            return task.model.build({**config, "model": model, "recipe": recipe}, task.data.read_info(data))
        except (KeyError, TypeError) as error:
            raise ValueError(_of_another_version(path, key, [str(error)])) from error


def _without_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model without those by which timm reads or fetches weights: the checkpoint's replace them."""
    return {name: value for name, value in options.items() if name not in WEIGHT_OPTIONS}


def _as_of_today(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which `recompute`, once a switch of models and of some mixers, names what models repeat."""
    model, mixer = dict(config["model"]), dict(config.get("mixer") or {})
    if isinstance(model.get("recompute"), bool):
        model["recompute"] = "mixer" if model["recompute"] else "none"
    if isinstance(mixer.get("options"), Mapping):
        mixer["options"] = _without_switch(mixer["options"])
    return {**config, "model": model, **({"mixer": mixer} if mixer else {})}


def _without_switch(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a mixer, or of each by name, without the former `recompute`."""
    return {
        name: _without_switch(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if name != "recompute"
    }


def _of_another_version(path: str | Path, key: str, missing: Iterable[str]) -> str:
    return (
        f"{key}={path} was written by another version of longseq: its configuration does not tell {', '.join(missing)}"
    )


def _require_ours(checkpoint: Any, path: str | Path, key: str) -> None:
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{key}={path} holds no Lightning checkpoint: name a file that `longseq train` wrote")
    stored = checkpoint.get("hyper_parameters")
    if not isinstance(stored, Mapping) or not {"config", "data"} <= set(stored):
        raise ValueError(
            f"{key}={path} is a Lightning checkpoint of another program (no longseq configuration in it): "
            "name a file that `longseq train` wrote"
        )


def _fill(backbone: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Load the task's weights into the backbone, each key and shape as it must be."""
    found = {
        key.removeprefix(BACKBONE_PREFIX): value for key, value in state.items() if key.startswith(BACKBONE_PREFIX)
    }
    wanted = backbone.state_dict()
    missing, unexpected = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    if missing or unexpected:
        parts = [
            f"{len(keys)} {what} ({_some(keys)})"
            for what, keys in (("missing", missing), ("unexpected", unexpected))
            if keys
        ]
        raise ValueError(
            f"{path}: its weights are not those of the {type(backbone).__name__} that its configuration describes: "
            f"{' and '.join(parts)}; it was probably written by another version of longseq or timm"
        )
    differing = [key for key, value in wanted.items() if value.shape != found[key].shape]
    if differing:
        key = differing[0]
        raise ValueError(
            f"{path}: {_some(differing)} have other shapes than its configuration describes "
            f"({key} {list(found[key].shape)}, not {list(wanted[key].shape)}); "
            "it was probably written by another version of longseq or timm"
        )
    backbone.load_state_dict(found)


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _example(folder: Path) -> Path:
    return min(folder.rglob("*.ckpt"), default=folder / "best.ckpt")
