"""Loads what `longseq train` writes: the model of a checkpoint or a folder, and the data of its run."""

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longseq.backbones.tokens import MODEL_TYPE, TokenBackbone
from longseq.hub import find_source, weight_files
from longseq.models import PLUGIN, SavedModel, read, restore
from longseq.plugins import check_loaded
from longseq.timm_models import stated_data, takes_any_resolution
from longseq.tokenizer_files import SETTINGS_FILE, find_separator

WINDOW = 2048  # the window, in tokens, of a language model whose training window is unknown

FILE_MODELS = "longseq.tools.export.file_model"  # the models of exported files, in a layer above this one


@dataclass(frozen=True)
class Loaded:
    """A trained backbone in eval mode, and its data.

    Attributes:
        path: as the user gave it.
        file: the checkpoint, or in a folder the first file of weights.
        config: the resolved configuration of the run; empty for a model that `longseq train` did not write.
        data: the fields of the task's info. `window_is_assumed` is True for a text model without a recorded `window`.
        weights: "ema" or "model", whichever were loaded.
    """

    path: Path
    file: Path
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
    any_resolution: bool = False,
    key: str = "checkpoint",
    tasks: Collection[str] = ("image",),
) -> Loaded:
    """Rebuild the model of a checkpoint or folder (see `longseq.models`); that of an exported file runs the file.

    Args:
        path: hf-hub:OWNER/NAME is fetched from the Hugging Face hub, unless its cache has it.
        weights: "ema" (the average of the weights), "model" (the raw weights) or "auto": the average if there is one.
        any_resolution: resize positions, so that the model takes images of any size.
        key: the name under which the user gave the file.
        tasks: whose models the caller can use; ValueError for others, and if weights or class names do not fit.
    """
    label = f"{key}={path}"
    file = find_source(path)
    described = file.is_file() and file.suffix != ".ckpt" and Path(f"{file}.json").is_file()  # by `longseq export`
    is_exported = described or file.suffix in (".onnx", ".pt2")
    exported = importlib.import_module(FILE_MODELS) if is_exported else None
    saved = exported.read(file, weights, label) if exported else read(file, weights, label)
    config = (saved.run.get("hyper_parameters") or {}).get("config") or {}
    # Weights load without the plug-in that registered the source of documents; a command needs it.
    registers = (saved.text or {}).get("source_plugin")
    check_loaded(sorted({*(config.get("plugins") or []), *filter(None, [registers])}), label)
    task = (config.get("task") or {}).get("name") or _task_of(saved)
    if task is None or task not in tasks:
        raise ValueError(f"{label} is of task={task}; this command takes {', '.join(tasks)}")
    backbone = exported.restore(saved, file) if exported else restore(saved)
    if any_resolution and saved.text is None and not (exported or takes_any_resolution(backbone)):
        backbone = restore(saved, {"dynamic_img_size": True})
    return Loaded(
        path=Path(path),
        file=file / weight_files(file)[0] if file.is_dir() else file,
        backbone=backbone.to(map_location),
        task_name=task,
        config=dict(config),
        data=known_data(saved, backbone),
        weights=saved.weights,
        epoch=saved.run["epoch"] + 1 if "epoch" in saved.run else 0,  # Lightning counts from 0, runs print from 1
        global_step=saved.run.get("global_step", 0),
    )


def known_data(saved: SavedModel, model: nn.Module) -> dict[str, Any]:
    """The data of a saved model, for `Loaded.data`."""
    data = (saved.run.get("hyper_parameters") or {}).get("data") or {}
    count = getattr(model, "num_classes", None)
    # Class numbers are the names of a model that states none.
    numbered = {} if count is None else {"num_classes": count, "class_names": [str(index) for index in range(count)]}
    known = {**numbered, **stated_data(model), **_text_data(saved, model), **data}
    names = known.get("class_names")
    if names is not None and count is not None and len(names) != count:
        raise ValueError(f"{saved.label}: its model has {count} classes and {len(names)} class names")
    return known


def _task_of(saved: SavedModel) -> str | None:
    """The task of a model that is saved without its run, None if unknown."""
    if "architecture" in saved.config or saved.config.get("kind") == PLUGIN:
        return "image"
    if saved.text is not None and "class_names" in saved.text:
        return "document"
    return "lm" if saved.text is not None and saved.config.get("model_type") == MODEL_TYPE else None


def _text_data(saved: SavedModel, model: nn.Module) -> dict[str, Any]:
    """The fields of `TextInfo` or `DocumentInfo` for a text model that is saved without its run."""
    if saved.text is not None and "class_names" in saved.text:
        return {**saved.text, **_window(saved.text["window"] or saved.text["max_length"])}
    if saved.text is None or not isinstance(model, TokenBackbone):
        return {}
    tokenizer = saved.text["tokenizer"]
    separator = find_separator(tokenizer)
    if separator is None:
        raise ValueError(f"{saved.label}: name the end-of-text token as eos_token in {SETTINGS_FILE}")
    return {
        "vocab_size": model.vocab_size,
        "separator": separator[1],
        "tokenizer": tokenizer,
        **_window(saved.text["window"] or model.max_length),
    }


def _window(known: int | None) -> dict[str, Any]:
    return {"window": known} if known else {"window": WINDOW, "window_is_assumed": True}
