"""Models as files: `config.json`, from which a model is built again, and `model.safetensors`, its weights.

    model.save_pretrained("folder")                 # also a README.md, the model card
    model = longseq.from_pretrained("folder")       # or a checkpoint of `longseq train`, or a repository of the hub
    model.push_to_hub("owner/name")

Large weights are spread over files, which model.safetensors.index.json lists. A model that reads text also has the
files of its tokenizer (see `longseq.tokenizer_files`).

`config.json` holds every argument of the model's constructor, so that a later version with other defaults builds the
same model. An argument that a later version adds must default to the earlier behaviour. Each kind of model is a class,
registered by `register_kind`; models of the kind timm are built by timm. No file names code to run: kinds and mixers
are looked up among those that are registered.

config.json:
    library_name, longseq_version: longseq, and the version that wrote the file.
    kind: the name under which the model's class is registered.
    model_args: all arguments of the constructor but `RUN_ARGUMENTS`, and for image models num_classes, a key below.
    plugins: the modules outside longseq that define the model's class and mixers (see `longseq.plugins`).
    architectures, model_type, id2label, label2id, problem_type: for transformers, to load a model of text.
    window, documents: of models of text, see `PretrainedModel.text`.
    architecture, num_classes, num_features, global_pool, label_names, pretrained_cfg: of image models, as timm writes
        and reads them. `pretrained_cfg` holds the preprocessing.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, distributed, nn

from longseq.arguments import KeepsArguments, check_choice
from longseq.blocks.sharding import has_shards, unsharded_class
from longseq.hub import CARD_FILE, CONFIG_FILE, HUB, INDEX_FILE, WEIGHTS_FILE, find_source, read_weights
from longseq.mixers import Mixer
from longseq.model_card import model_card
from longseq.plugin_models import describe_plugin_model, is_plugin_model, rebuild_plugin_model
from longseq.plugins import check_loaded, plugin_of
from longseq.timm_models import describe_timm_model, is_timm_model, rebuild_timm_model
from longseq.tokenizer_files import TOKENIZER_FILE, read_folder, tokenizer_files
from longseq.version import installed_version

# Arguments that do not change what the model computes: each run chooses its own.
RUN_ARGUMENTS = ("backend", "recompute")

# Models that timm builds, and models whose class a configuration names in a plug-in. Their classes are not registered.
TIMM, PLUGIN = "timm", "plugin"
_REBUILD: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], nn.Module]] = {
    TIMM: rebuild_timm_model,
    PLUGIN: rebuild_plugin_model,
}

WEIGHTS = ("auto", "ema", "model")

# Keys of a training checkpoint: the model's config.json, the weights, the weights before averaging, the settings.
CHECKPOINT_CONFIG = "model_config"
CHECKPOINT_WEIGHTS = "state_dict"
CHECKPOINT_RAW_WEIGHTS = "current_model_state"
CHECKPOINT_RUN = "hyper_parameters"
CHECKPOINT_PREFIX = "backbone."

# Further keys of `PretrainedModel.text` for document classifiers (see `longseq.tasks.document.config.DocumentInfo`).
_DOCUMENTS = ("vocab_size", "separator", "max_length", "truncation")
DOCUMENT_KEYS = ("class_names", "multi_label", *_DOCUMENTS)
_STATED = ("text_column", "thresholds", "source", "source_plugin", "preparation")

# transformers' names for one class a document (False), and for any number of labels.
_PROBLEM_TYPES = {False: "single_label_classification", True: "multi_label_classification"}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_KINDS: dict[str, type[PretrainedModel]] = {}

# The modules of this package's kinds, imported when a file names the kind.
OWN_KINDS = {
    "image": "longseq.backbones.image",
    "document": "longseq.backbones.classifier",
    "document_pair": "longseq.backbones.document_pairs",
    "linear": "longseq.backbones.linear_text",
    "sequence_autoencoder": "longseq.backbones.autoencoder",
    "token": "longseq.backbones.tokens",
}

ModelClass = TypeVar("ModelClass", bound="type[PretrainedModel]")


class PretrainedModel(KeepsArguments):
    """Base class, next to `nn.Module`, of models that are saved and built again: see `register_kind`.

    The constructor's arguments are numbers, strings, lists, dictionaries and models of other kinds. `decided_options`
    are options of mixers that the model sets itself; they are not saved.

    Attributes:
        text: of a model that reads text: its `tokenizer`, as in `longseq.tokenizer_files`, and the `window` of its
            training in tokens (None: unknown). A document classifier also has `DOCUMENT_KEYS`, and no tokenizer (None)
            if documents consist of tokens. Saved next to the weights.
    """

    decided_options: ClassVar[tuple[str, ...]] = ()

    text: Mapping[str, Any] | None = None

    def saved_arguments(self) -> dict[str, Any]:
        """The constructor's arguments as JSON types, without `RUN_ARGUMENTS`."""
        return {name: _to_plain(value) for name, value in self.arguments.items() if name not in RUN_ARGUMENTS}

    def describe(self) -> dict[str, Any]:
        """`model_args`, and the keys of config.json that only this kind has."""
        return {"model_args": self.saved_arguments()}

    def describe_use(self) -> dict[str, Any]:
        """The keys of config.json for programs that use the model; models inside another one omit them."""
        text = self.text or {}
        use = {} if text.get("window") is None else {"window": text["window"]}
        if "class_names" not in text:
            return use
        names = text["class_names"]
        return use | {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": _PROBLEM_TYPES[bool(text["multi_label"])],
            "documents": {key: text[key] for key in _DOCUMENTS} | _stated(text),
        }

    @classmethod
    def rebuild(cls, config: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
        """Build the model of a config.json with new weights; `changes` override arguments."""
        return cls(**{name: _from_plain(value) for name, value in config["model_args"].items()} | dict(changes))

    def save_pretrained(self: Any, folder: str | Path, **options: Any) -> Path:
        """Save the model; see `longseq.save_pretrained`."""
        return save_pretrained(self, folder, **options)

    def push_to_hub(self: Any, repo_id: str, **options: Any) -> str:
        """Upload the model; see `longseq.push_to_hub`."""
        return push_to_hub(self, repo_id, **options)


def register_kind(name: str) -> Callable[[ModelClass], ModelClass]:
    """Register a class of models under a name: `@register_kind("token")`."""

    def enter(model: ModelClass) -> ModelClass:
        if name in _REBUILD or name in _KINDS or OWN_KINDS.get(name, model.__module__) != model.__module__:
            raise ValueError(f"the kind of models {name!r} is taken")
        _KINDS[name] = model
        return model

    return enter


def kind_of(model: nn.Module) -> str | None:
    """The kind of a model; None if it has no kind and cannot be saved."""
    own = unsharded_class(model)
    name = next((name for name, registered in _KINDS.items() if registered is own), None)
    if name is None and is_plugin_model(model):
        return PLUGIN
    return TIMM if name is None and is_timm_model(model) else name


@dataclass(frozen=True)
class SavedModel:
    """The contents of a folder or a checkpoint: `config` from config.json, and `state`, the weights by name.

    `label` names the file in messages; `weights`, "ema" or "model", is the kind of weights in `state`; `run` is the
    training checkpoint that holds the model, empty for a folder; `text` is `PretrainedModel.text`.
    """

    label: str
    config: Mapping[str, Any]
    state: Mapping[str, Tensor]
    weights: str = "model"
    run: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] | None = None


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    metrics: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write config.json, model.safetensors and, if the folder has none, README.md; returns the folder.

    For a model sharded by `fully_shard`, all processes call this, and the first one writes.

    Args:
        metrics: such as the contents of a run's metrics.json, listed in README.md, the model card.
        max_shard_size: the most bytes of a file of weights; larger models have several, and an index.

    Raises:
        ValueError: the model is of no registered kind.
    """
    config = describe(model)
    folder = Path(folder)
    texts: dict[str, str] = {}
    if isinstance(model, PretrainedModel) and model.text is not None and model.text["tokenizer"] is not None:
        texts |= tokenizer_files(model.text["tokenizer"], documents=model.text if "truncation" in model.text else None)
    card = model_card(model, config, metrics or {}, has_tokenizer=TOKENIZER_FILE in texts)
    if "num_classes" in config and config["kind"] != PLUGIN:  # a key of its own in config.json, like in timm's files
        arguments = {name: value for name, value in config["model_args"].items() if name != "num_classes"}
        config = {**config, "model_args": arguments}
    texts[CONFIG_FILE] = json.dumps(config, indent=2) + "\n"
    if not (folder / CARD_FILE).exists():
        texts[CARD_FILE] = card
    if not has_shards(model):
        _write(folder, texts, _separate(model.state_dict()), max_shard_size)
        return folder
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    try:
        if distributed.get_rank() == 0:
            _write(folder, texts, _separate(whole), max_shard_size)
    finally:
        distributed.barrier()  # if the first process cannot write, the others must not wait for it
    return folder


def _write(folder: Path, texts: Mapping[str, str], state: Mapping[str, Tensor], max_shard_size: int | str) -> None:
    """Write all files to a temporary folder inside `folder`, then move them: an error leaves the old model."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:
        for name, text in texts.items():
            Path(temporary, name).write_text(text, encoding="utf-8")
        save_torch_state_dict(dict(state), temporary, max_shard_size=max_shard_size)
        written = os.listdir(temporary)
        for name in written:
            # safetensors ignores the umask: only the owner could read its files.
            shutil.copymode(Path(temporary, CONFIG_FILE), Path(temporary, name))
        for name in written:
            os.replace(Path(temporary, name), folder / name)
    for path in folder.iterdir():  # the weights of another model that was here
        if path.name not in written and (path.name in (WEIGHTS_FILE, INDEX_FILE) or _SHARD.fullmatch(path.name)):
            path.unlink()


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    metrics: Mapping[str, Any] | None = None,
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Add model",
) -> str:
    """Upload the files of `save_pretrained` to a repository of the Hugging Face hub, which is created if missing.

    A README.md in the repository is kept. `token` defaults to the one of `huggingface_hub.login`. Returns the commit's
    URL.
    """
    from huggingface_hub import HfApi

    with TemporaryDirectory() as folder:
        save_pretrained(model, folder, metrics=metrics)
        api = HfApi(token=token, library_name="longseq", library_version=installed_version())
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if api.file_exists(repo_id=repo_id, filename=CARD_FILE, revision=revision):
            Path(folder, CARD_FILE).unlink()
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
        )
        return commit.commit_url


def from_pretrained(
    source: str | Path,
    *,
    weights: str = "auto",
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    **changes: Any,
) -> Any:
    """Load a model in evaluation mode; random states stay as they are.

    Args:
        source: a folder of `save_pretrained`, a checkpoint of `longseq train`, or OWNER/NAME on the Hugging Face hub,
            also as hf-hub:OWNER/NAME@REVISION.
        weights: of a checkpoint: "ema" (the average of the weights), "model" (the weights themselves) or "auto": the
            average if the run kept one.
        device: the device of the model.
        dtype: the type of the weights, such as torch.bfloat16 or "bfloat16", or "auto", the file's. The default is
            float32, whatever the file's, so that the model can be trained on. Some layers always keep their weights in
            float32 (see `longseq.blocks.precision`).
        revision, token, cache_dir: passed to `huggingface_hub.snapshot_download`.
        changes: other values of constructor arguments that leave the weights as they are, such as `backend="torch"` or
            `dynamic_img_size=True`.

    Raises:
        ValueError: the file holds no model, or its layers compute something else by now.
        RuntimeError: the weights do not fit the model.
    """
    if not Path(source).exists() and _HUB_ID.fullmatch(str(source)):
        source = f"{HUB}{source}"
    saved = read(find_source(source, revision, token, cache_dir), weights)
    if dtype == "auto":  # the narrowest one: some weights stay in float32 in half precision
        found = {value.dtype for value in saved.state.values() if value.is_floating_point()}
        dtype = min(found, key=lambda one: one.itemsize, default=None)
    return restore(saved, changes, getattr(torch, dtype) if isinstance(dtype, str) else dtype).to(device)


def read(source: str | Path, weights: str = "auto", label: str | None = None) -> SavedModel:
    """Read a folder of `save_pretrained` or a training checkpoint; `label` names it in messages. Raises ValueError."""
    check_choice("weights", weights, WEIGHTS)
    path, label = Path(source), label or str(source)
    if not path.is_dir():
        return _read_checkpoint(path, weights, label)
    if weights == "ema":
        raise ValueError(f"{label} is a folder, which has no averaged weights besides the others")
    config, text = _read_config(path)
    return SavedModel(label, config, read_weights(path), text=text)


def restore(saved: SavedModel, changes: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a saved model in evaluation mode and load its weights, as `dtype` if given; `changes` override options."""
    check_loaded(saved.config.get("plugins") or [], saved.label)
    # The constructor draws weights, which are replaced: the generators' states are restored.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        model = build(saved.config, changes, saved.label)
    if dtype is not None:
        model.to(dtype)
    model.load_state_dict(saved.state)
    if isinstance(model, PretrainedModel):
        model.text = saved.text
    return model.eval()


def describe(model: nn.Module) -> dict[str, Any]:
    """The contents of the model's config.json; ValueError if the model is of no registered kind."""
    kind = kind_of(model)
    if kind is None:
        raise ValueError(f"{type(model).__name__} is no registered kind of model (see longseq.register_kind)")
    if isinstance(model, PretrainedModel):
        return {**describe_origin(model), **model.describe_use(), **model.describe()}
    own = describe_plugin_model(model) if kind == PLUGIN else describe_timm_model(model)
    return {**describe_origin(model), **own}


def describe_origin(model: nn.Module) -> dict[str, Any]:
    """The keys of config.json about the code that wrote it."""
    parts = [part for part in model.modules() if isinstance(part, Mixer | PretrainedModel) or is_plugin_model(part)]
    classes: list[type] = [unsharded_class(part) for part in parts]
    foreign = [cls for cls in classes if not cls.__module__.startswith("longseq.")]
    return {
        "library_name": "longseq",
        "longseq_version": installed_version(),
        "kind": kind_of(model),
        "plugins": sorted({plugin_of(cls) or cls.__module__ for cls in foreign}),
    }


def build(config: Mapping[str, Any], changes: Mapping[str, Any] | None = None, label: str = CONFIG_FILE) -> nn.Module:
    """Build the model of a config.json with new weights; `label` names the file in messages."""
    # timm's `save_for_hf` writes no kind.
    unnamed = "image" if str(config.get("architecture")).startswith("longseq_") else TIMM
    kind = config.get("kind", unnamed if "architecture" in config else None)
    if kind in OWN_KINDS:
        importlib.import_module(OWN_KINDS[kind])
    if kind not in _REBUILD and kind not in _KINDS:
        raise ValueError(f"{label} holds a model of the kind {kind}, which is not registered")
    rebuild = _REBUILD[kind] if kind in _REBUILD else _KINDS[kind].rebuild
    return rebuild(config, changes or {})


def check_continues(model: nn.Module, config: Mapping[str, Any] | None) -> None:
    """Raise ValueError if a checkpoint's `config` does not describe this model, such as after a default has changed."""
    if config is None or kind_of(model) is None:
        return
    saved, own = config["model_args"], describe(model)["model_args"]
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            raise ValueError(f"its model was built with {name}={saved.get(name)}, this one with {name}={own.get(name)}")


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The contents of a folder's config.json, and `PretrainedModel.text`."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if {"model_args", "num_classes"} <= config.keys() and config.get("kind") != PLUGIN:
        config["model_args"] = {"num_classes": config["num_classes"], **config["model_args"]}
    tokenizer = read_folder(folder)
    text = {"tokenizer": tokenizer, "window": config.get("window")}
    if "documents" in config:
        documents, names = config["documents"], config["id2label"]
        text["class_names"] = [names[str(number)] for number in range(len(names))]
        text["multi_label"] = config["problem_type"] == _PROBLEM_TYPES[True]
        text |= {key: documents[key] for key in _DOCUMENTS} | _stated(documents)
    return config, None if tokenizer is None and "documents" not in config else text


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that only some trainings have."""
    return {key: values[key] for key in _STATED if values.get(key) is not None}


def _read_checkpoint(path: Path, weights: str, label: str) -> SavedModel:
    """The model in a checkpoint of `longseq train`."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    config = checkpoint.get(CHECKPOINT_CONFIG)
    if config is None:
        raise ValueError(f"{label} is no checkpoint of `longseq train`")
    averaged = CHECKPOINT_RAW_WEIGHTS in checkpoint
    if weights == "ema" and not averaged:
        raise ValueError(f"{label} holds no averaged weights")
    taken = "ema" if averaged and weights != "model" else "model"
    state = checkpoint[CHECKPOINT_RAW_WEIGHTS if averaged and taken == "model" else CHECKPOINT_WEIGHTS]
    prefix = CHECKPOINT_PREFIX
    # torch.compile(model) is a module that holds the model as `_orig_mod`.
    own = {
        name.removeprefix(prefix).replace("_orig_mod.", ""): value
        for name, value in state.items()
        if name.startswith(prefix)
    }
    data = (checkpoint.get(CHECKPOINT_RUN) or {}).get("data") or {}
    text = None
    if all(key in data for key in ("tokenizer", *DOCUMENT_KEYS)):
        text = {key: data.get(key) for key in ("tokenizer", "window", *DOCUMENT_KEYS)} | _stated(data)
    elif data.get("tokenizer"):
        text = {key: data.get(key) for key in ("tokenizer", "window")}
    return SavedModel(label, config, own, taken, checkpoint, text)


def _separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, copied if they share memory or are parts of more, which cannot be saved."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        is_own = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen
        separate[name] = tensor if is_own else tensor.clone()
        seen.add(storage.data_ptr())
    return separate


def _to_plain(value: Any) -> Any:
    """An argument as JSON types; a model of a kind becomes `{kind, model_args}`."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    if isinstance(value, PretrainedModel) and isinstance(value, nn.Module):
        return {"kind": kind_of(value), **value.describe()}
    return value


def _from_plain(value: Any) -> Any:
    """Undo `_to_plain`: a description of a model becomes the model."""
    is_model = isinstance(value, Mapping) and {"kind", "model_args"} <= set(value)
    return build(value) if is_model else value
