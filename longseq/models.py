"""Models as files: `config.json`, from which a model is built again, and `model.safetensors`, its weights.

Weights above a size are spread over files, which model.safetensors.index.json lists. A model that reads text also has
the files of its tokenizer (see `longseq.tokenizer_files`).

    model.save_pretrained("folder")                 # also a README.md, the model card
    model = longseq.from_pretrained("folder")       # or a checkpoint of `longseq train`, or a repository of the hub
    model.push_to_hub("owner/name")

`config.json` has the kind of the model and the value of every argument of its constructor, so that a later version with
other defaults builds the same model. Each kind is a class, registered by `register_kind`; models of timm are of the
kind timm, and timm builds them from its own registry. No file names code to run: a kind and a mixer are found by their
names among those that are registered.

config.json:
    library_name, longseq_version: longseq, and the version that wrote the file.
    config_version: of this list of keys, `CONFIG_VERSION`.
    kind: the name under which the model's class is registered.
    model_args: all arguments of the constructor but those in `RUN_ARGUMENTS`. Those of image models repeat the keys
        above and the next two as `saved_by`, because timm keeps nothing else, and leave out num_classes, which is a key
        below: transformers gives timm both.
    revisions: which function of its weights each kind of layer computes (see `longseq.mixers.check_revisions`).
    plugins: the modules outside longseq that define the model's class and mixers (see `longseq.plugins`).
    architectures, model_type: of language models and classifiers of documents, so that transformers loads the folder
        (see `longseq.tools.hugging_face`).
    window: of models that were trained on text: the tokens of a training window, or of the longest document.
    id2label, label2id, problem_type: of classifiers of documents: their classes, as transformers writes them.
    documents: of these classifiers: what else `DOCUMENT_KEYS` names; `text_column`, `thresholds`, the `source` of the
        documents, its `source_plugin` and its `preparation` of a text, where they are known.
    num_classes, label_names, pretrained_cfg: of models of the kind `plugin`, whose class `model_args` names: as below.
    timm_version, timm_defaults: of models that timm builds: its version, and the defaults of the constructor's options,
        with which a later timm is compared.
    architecture, num_classes, num_features, global_pool, label_names, pretrained_cfg: of image models, as timm writes
        them, so that timm reads the folder too. `pretrained_cfg` holds the preprocessing.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar
from zipfile import BadZipFile, ZipFile

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from longseq.arguments import KeepsArguments, complete, copy_containers
from longseq.blocks.sharding import gather, is_sharded, unsharded_class
from longseq.checksum import CHECKSUM, checksum
from longseq.files import partial_path, replacing, writing
from longseq.mixers import Mixer, check_revisions, mixer_revisions
from longseq.mixers import get as get_mixer
from longseq.mixers.pattern import options_by_name
from longseq.model_card import model_card
from longseq.plugin_models import describe_plugin_model, is_plugin_model, rebuild_plugin_model
from longseq.plugins import check_loaded, plugin_of
from longseq.timm_models import describe_timm_model, is_timm_model, rebuild_timm_model
from longseq.tokenizer_files import GENERATION_FILE, SETTINGS_FILE, TOKENIZER_FILE, read_folder, tokenizer_files
from longseq.version import installed_version

CONFIG_VERSION = 1

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CARD_FILE = "README.md"

# Arguments that decide how a machine runs a model and not what the model computes: each run chooses its own.
RUN_ARGUMENTS = ("backend", "recompute")

# The kind of models that timm builds, and of those whose class a configuration has named in a plug-in.
TIMM, PLUGIN = "timm", "plugin"
# Classes of neither kind are not registered.
_REBUILD: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], nn.Module]] = {
    TIMM: rebuild_timm_model,
    PLUGIN: rebuild_plugin_model,
}

WEIGHTS = ("auto", "ema", "model")

# Keys of a training checkpoint: the model's config.json, the weights, and the weights of which those are an average.
CHECKPOINT_CONFIG = "model_config"
CHECKPOINT_WEIGHTS = "state_dict"
CHECKPOINT_RAW_WEIGHTS = "current_model_state"
CHECKPOINT_RUN = "hyper_parameters"
CHECKPOINT_PREFIX = "backbone."

# What `PretrainedModel.text` has of classifiers of documents beside the tokenizer: see
# `longseq.tasks.document.info.DocumentInfo`.
_DOCUMENTS = ("vocab_size", "separator", "max_length", "truncation")
DOCUMENT_KEYS = ("class_names", "multi_label", *_DOCUMENTS)
_STATED = ("text_column", "thresholds", "source", "source_plugin", "preparation")

# The names that transformers has for one class a document, and for any number of labels.
_PROBLEM_TYPES = {False: "single_label_classification", True: "multi_label_classification"}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Where a file or folder could stand, a repository of the hub has this before its name, as in timm.
HUB = "hf-hub:"
# Archives begin with these bytes; those of an export have one of these records. Files of weights have these endings.
_ZIP = b"PK"
_OF_EXPORTED = ("/constants.pkl", "/extra/longseq.json", "/archive_format")
_CHECKPOINT_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".tar", "")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_KINDS: dict[str, type[PretrainedModel]] = {}

# The kinds of this package and their modules, which are imported when a file names the kind.
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
    """Base class, beside `nn.Module`, of models that are saved and built again: see `register_kind`.

    The constructor's arguments are numbers, words, lists, dictionaries and models of other kinds. `mixer` and
    `mixer_options` together mean a pattern of mixers and their options.

    Class attributes:
        decided_options: options of mixers that the model decides itself; they are not saved.

    Attributes:
        text: of a model that reads text: its `tokenizer`, as in `longseq.tokenizer_files`, and the `window` of its
            training in tokens, None where it is not known. A classifier of documents also has `DOCUMENT_KEYS`, and no
            tokenizer (None) where documents consist of tokens. Files keep it beside the weights.
    """

    decided_options: ClassVar[tuple[str, ...]] = ()

    text: Mapping[str, Any] | None = None

    def saved_arguments(self) -> dict[str, Any]:
        """The constructor's arguments as JSON types, without those of the run."""
        kept = {name: value for name, value in self.arguments.items() if name not in RUN_ARGUMENTS}
        return {name: _to_plain(value, f"{type(self).__name__}'s {name}") for name, value in kept.items()}

    @classmethod
    def complete_arguments(cls, saved: Mapping[str, Any], optional: Collection[str] = ()) -> dict[str, Any]:
        """Add the arguments, and the options of mixers, that did not exist when these were saved (see `complete`)."""
        arguments = complete(cls, saved, optional=(*RUN_ARGUMENTS, *optional))
        if "mixer" in arguments and "mixer_options" in arguments:
            chosen = options_by_name(arguments["mixer"], arguments["mixer_options"])
            free = ("d_model", *RUN_ARGUMENTS, *cls.decided_options)
            completed = {name: complete(get_mixer(name), own, optional=free) for name, own in chosen.items()}
            arguments["mixer_options"] = completed if len(completed) > 1 else next(iter(completed.values()))
        return arguments

    def describe(self) -> dict[str, Any]:
        """The keys of config.json that only this kind has, and `model_args`."""
        return {"model_args": self.saved_arguments()}

    def describe_use(self) -> dict[str, Any]:
        """The keys of config.json for programs that use the model; a model within another one does not have them."""
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
        """Build the model of a config.json, with other values of some arguments; its weights are initialised anew."""
        arguments = cls.complete_arguments(config["model_args"])
        return cls(**{name: _from_plain(value) for name, value in arguments.items()} | dict(changes))

    def save_pretrained(self, folder: str | Path, **options: Any) -> Path:
        """Save the model; see `longseq.save_pretrained`."""
        assert isinstance(self, nn.Module)
        return save_pretrained(self, folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model; see `longseq.push_to_hub`."""
        assert isinstance(self, nn.Module)
        return push_to_hub(self, repo_id, **options)


def register_kind(name: str) -> Callable[[ModelClass], ModelClass]:
    """Register a class of models under a name: `@register_kind("token")`."""

    def enter(model: ModelClass) -> ModelClass:
        if name in _REBUILD or name in _KINDS or OWN_KINDS.get(name, model.__module__) != model.__module__:
            raise ValueError(f"the kind of models {name!r} is taken; choose another name")
        _KINDS[name] = model
        return model

    return enter


def kind_of(model: nn.Module) -> str | None:
    """The kind of a model; None for a model of no kind, which cannot be saved."""
    own = unsharded_class(model)
    name = next((name for name, registered in _KINDS.items() if registered is own), None)
    if name is None and is_plugin_model(model):
        return PLUGIN
    return TIMM if name is None and is_timm_model(model) else name


@dataclass(frozen=True)
class SavedModel:
    """The contents of a folder or a checkpoint: `config`, those of config.json, and `state`, the weights by name.

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
    """Write config.json, model.safetensors and, where the folder has none, README.md; returns the folder.

    Of a model that `fully_shard` has spread over processes all of them call this, and the first one writes.

    Args:
        metrics: such as the contents of a run's metrics.json, listed in README.md, the model card.
        max_shard_size: the most bytes of a file of weights; larger models have several, and an index.

    Raises:
        ValueError: the model is of no registered kind, was changed so that its constructor's arguments do not describe
            it any more, or has weights that are no plain tensors.
    """
    config = describe(model)
    state = model.state_dict()
    _check_description(config, state)
    folder = Path(folder)
    texts = {CONFIG_FILE: json.dumps(_as_written(config), indent=2) + "\n"}
    if isinstance(model, PretrainedModel) and model.text is not None and model.text["tokenizer"] is not None:
        texts |= tokenizer_files(model.text["tokenizer"], documents=model.text if "truncation" in model.text else None)
    card = model_card(model, config, metrics or {}, has_tokenizer=TOKENIZER_FILE in texts)
    if not any(map(is_sharded, state.values())):
        _write(folder, texts, _separate(state), card, max_shard_size)
        return folder
    whole = gather(state)
    try:
        if whole is not None:
            _write(folder, texts, whole, card, max_shard_size)
    finally:
        distributed.barrier()  # if the first process cannot write, the others must not wait for it
    return folder


def _as_written(config: Mapping[str, Any]) -> dict[str, Any]:
    """A description as config.json has it: an image model's number of classes stands once, where timm has it."""
    if not _is_of_timm(config):
        return dict(config)
    arguments = {name: value for name, value in config["model_args"].items() if name != "num_classes"}
    return {**config, "model_args": arguments}


def _is_of_timm(config: Mapping[str, Any]) -> bool:
    states_classes = "num_classes" in config and isinstance(config.get("model_args"), Mapping)
    return states_classes and config.get("kind") != PLUGIN


def _write(
    folder: Path, texts: Mapping[str, str], state: Mapping[str, Tensor], card: str, max_shard_size: int | str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    split = split_torch_state_dict_into_shards(
        dict(state), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        texts = {**texts, INDEX_FILE: json.dumps(index, indent=2, sort_keys=True) + "\n"}
    written = {*split.filename_to_tensors, *texts}
    with ExitStack() as failed:  # no file has its name before all are whole
        for name in written:
            failed.callback(partial_path(folder / name).unlink, missing_ok=True)
        for name, keys in split.filename_to_tensors.items():
            shard = {key: state[key] for key in keys}
            with writing(folder / name) as partial:
                save_file(shard, partial, metadata={"format": "pt", CHECKSUM: checksum(shard)})
        for name, text in texts.items():
            with writing(folder / name) as partial:
                partial.write_text(text, encoding="utf-8")
        for name in written:
            os.replace(partial_path(folder / name), folder / name)
    for path in folder.iterdir():  # the weights of another model that was here
        if path.name not in written and (path.name in (WEIGHTS_FILE, INDEX_FILE) or _SHARD.fullmatch(path.name)):
            path.unlink()
    if not (folder / CARD_FILE).exists():
        with replacing(folder / CARD_FILE) as partial:
            partial.write_text(card, encoding="utf-8")


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

    A README.md in the repository is kept. `token` is by default that of `huggingface_hub.login`. Returns the address of
    the commit.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="longseq", library_version=installed_version())
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with TemporaryDirectory() as folder:
        save_pretrained(model, folder, metrics=metrics)
        if api.file_exists(repo_id=repo_id, filename=CARD_FILE, revision=revision):
            (Path(folder) / CARD_FILE).unlink()
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
            average where the run kept one.
        device: the device of the model.
        dtype: the type of the weights, such as torch.bfloat16 or "bfloat16", or "auto", that of the file. By default
            torch's, float32, whatever that of the file is, so that a model can be trained on. Layers whose weights
            stay in float32 in half precision do so here (see `longseq.blocks.precision`).
        revision, token, cache_dir: those of `huggingface_hub.hf_hub_download`.
        changes: other values of constructor arguments that leave the weights as they are, such as `backend="torch"` or
            `dynamic_img_size=True`.

    Raises:
        ValueError: in one line, what is wrong with the file: there is none, it is damaged, it holds no model, its
            layers compute something else by now, or it was saved by a newer version; `dtype` is no type of weights.
    """
    given = None if dtype is None or dtype == "auto" else _floating_type(dtype)
    if not Path(source).exists() and _HUB_ID.fullmatch(str(source)):
        source = f"{HUB}{source}"
    saved = read(find_source(source, revision, token, cache_dir), weights)
    return restore(saved, changes, _type_of(saved.state) if dtype == "auto" else given).to(device)


def read(source: str | Path, weights: str = "auto", label: str | None = None) -> SavedModel:
    """Read a folder of `save_pretrained` or a training checkpoint; `label` names it in messages.

    Raises:
        ValueError: see `from_pretrained`.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights} is unknown: take one of {', '.join(WEIGHTS)}")
    path, label = Path(source), label or str(source)
    return _read_folder(path, weights, label) if path.is_dir() else _read_checkpoint(path, weights, label)


def find_source(
    source: str | Path, revision: str | None = None, token: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The file or folder of a model: `source` itself, or that of hf-hub:OWNER/NAME@REVISION in the hub's cache.

    The files of a repository are fetched. A revision in `source` comes before the argument.

    Raises:
        ValueError: in one line, the name is none of a repository, or it cannot be fetched.
    """
    if not is_on_hub(source):
        return Path(source)
    repo_id, at, named = str(source).removeprefix(HUB).partition("@")
    if not _HUB_ID.fullmatch(repo_id) or (at and not named):
        raise ValueError(f"{source} names no repository of the hub: write {HUB}OWNER/NAME, or {HUB}OWNER/NAME@REVISION")
    return _download(repo_id, named or revision, token, cache_dir)


def is_on_hub(source: str | Path) -> bool:
    """True for hf-hub:OWNER/NAME, unless a file or folder has this name."""
    return str(source).startswith(HUB) and not Path(source).exists()


def restore(saved: SavedModel, changes: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a saved model, with other values of some arguments, and load its weights; in evaluation mode.

    `dtype` is the type of the weights, by default torch's.
    """
    check_loaded(saved.config.get("plugins") or [], saved.label)
    # Initialising the weights, which are replaced, draws random numbers: the generators' states are restored.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        model = build(saved.config, changes, saved.label)
    try:
        check_revisions(model, saved.config.get("revisions"))
    except ValueError as error:
        raise ValueError(f"{saved.label}: {error}") from error
    if dtype is not None:
        model.to(dtype)
    _fill(model, saved)
    if isinstance(model, PretrainedModel):
        model.text = saved.text
    return model.eval()


def describe(model: nn.Module) -> dict[str, Any]:
    """The contents of the model's config.json.

    Raises:
        ValueError: the model is of no registered kind.
    """
    kind = kind_of(model)
    if kind is None:
        name = type(model).__name__
        raise ValueError(
            f"a {name} cannot be saved: derive it from longseq.models.PretrainedModel and enter it by "
            f'@longseq.register_kind("{name.lower()}")'
        )
    if isinstance(model, PretrainedModel):
        return {**describe_origin(model), **model.describe_use(), **model.describe()}
    own = describe_plugin_model(model) if kind == PLUGIN else describe_timm_model(model)
    return {**describe_origin(model), **own}


def describe_origin(model: nn.Module) -> dict[str, Any]:
    """The keys of config.json that state which version wrote the others."""
    return {
        "library_name": "longseq",
        "longseq_version": installed_version(),
        "config_version": CONFIG_VERSION,
        "kind": kind_of(model),
        "revisions": mixer_revisions(model),
        "plugins": _plugins(model),
    }


def build(config: Mapping[str, Any], changes: Mapping[str, Any] | None = None, label: str = CONFIG_FILE) -> nn.Module:
    """Build the model of a config.json with initialised weights; `label` names the file in messages."""
    check_config_version(config, label)
    kind = config.get("kind", TIMM if "architecture" in config else None)
    if not isinstance(config.get("model_args", {}), Mapping) or kind is None:
        raise ValueError(f"{label} names no model of longseq: {CONFIG_FILE} needs the keys kind and model_args")
    if kind in OWN_KINDS:
        importlib.import_module(OWN_KINDS[kind])
    if kind not in _REBUILD and kind not in _KINDS:
        raise ValueError(f"{label} holds a model of the kind {kind}, which is not registered{_origin(config)}")
    rebuild = _REBUILD[kind] if kind in _REBUILD else _KINDS[kind].rebuild
    try:
        return rebuild(config, changes or {})
    except KeyError as error:
        raise ValueError(f"{label} does not tell {error}{_origin(config)}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{label} cannot be built: {error}{_origin(config)}") from error


def check_continues(model: nn.Module, config: Mapping[str, Any] | None) -> None:
    """Raise ValueError unless `config`, the description in a checkpoint, is that of this model.

    Arguments differ where a default has changed since the checkpoint was written.
    """
    if config is None or kind_of(model) is None:
        return
    check_revisions(model, config.get("revisions"))
    before = getattr(type(model), "arguments_before", {})
    saved, own = {**before, **config["model_args"]}, describe(model)["model_args"]
    differing = [name for name in sorted(saved.keys() | own.keys()) if saved.get(name) != own.get(name)]
    differing = [name for name in differing if name != "saved_by"]
    if differing:
        name = differing[0]
        raise ValueError(f"its model was built with {name}={saved.get(name)}, this one with {name}={own.get(name)}")


def check_config_version(config: Mapping[str, Any], label: str) -> None:
    """Raise ValueError for a config.json in a format of a newer version of longseq."""
    version = config.get("config_version", CONFIG_VERSION)
    if not isinstance(version, int) or version > CONFIG_VERSION:
        raise ValueError(
            f"{label} is of config_version {version}, this longseq {installed_version()} reads up to "
            f"{CONFIG_VERSION}: install longseq {config.get('longseq_version', 'of a later date')}"
        )


def mixer_options_of(
    pattern: Any, given: Mapping[str, Any] | None, names: Iterable[str], layers: Iterable[nn.Module], without: Any = ()
) -> dict[str, Any]:
    """The complete options of the mixers in a stack of layers, in the form in which a model takes `mixer_options`.

    `names` are those of the layers' mixers. The result keeps `given` options of mixers that the pattern names and no
    layer has, and those whose values layers take in turn.
    """
    options = options_by_name(pattern, given)
    in_turn = {
        name: {key: copy_containers(own[key]) for key in get_mixer(name).options_in_turn if key in own}
        for name, own in options.items()
    }
    left_out = ("d_model", *RUN_ARGUMENTS, *without)
    for name, layer in zip(names, layers, strict=True):
        mixer = next(part for part in layer.modules() if isinstance(part, Mixer))
        complete_options = {key: value for key, value in mixer.arguments.items() if key not in left_out}
        options[name] = complete_options | in_turn[name]
    return options if len(options) > 1 else next(iter(options.values()))


def _read_folder(folder: Path, weights: str, label: str) -> SavedModel:
    saved, state = read_description(folder, label), dict[str, Tensor]()
    if weights == "ema":
        raise ValueError(f"{label} holds one set of weights: leave weights=ema out")
    for name in weight_files(folder, label):
        state |= _read_weights(folder / name, label)
    return replace(saved, state=state)


def read_description(folder: Path, label: str) -> SavedModel:
    """What a folder of `save_pretrained` says of its model, without the weights. ValueError as of `read`."""
    if not (folder / CONFIG_FILE).is_file():
        example = min(folder.rglob("*.ckpt"), default=None)
        which = "" if example is None else f", such as {example}"
        lacks = " and without a checkpoint" if example is None else ""
        raise ValueError(
            f"{label} is a folder without {CONFIG_FILE}{lacks}: give one that save_pretrained wrote, or a checkpoint"
            f"{which}"
        )
    config = _read_config(folder / CONFIG_FILE, label)
    return SavedModel(label, config, {}, text=_text_of(config, read_folder(folder), label))


def _text_of(config: Mapping[str, Any], tokenizer: Mapping[str, Any] | None, label: str) -> dict[str, Any] | None:
    """`PretrainedModel.text` of a folder with this config.json and this tokenizer."""
    names, documents = config.get("id2label"), config.get("documents")
    text = {"tokenizer": tokenizer, "window": config.get("window")}
    if not (isinstance(names, Mapping) and isinstance(documents, Mapping)):
        return None if tokenizer is None else text
    try:
        listed = [names[str(number)] for number in range(len(names))]
        known = {key: documents[key] for key in _DOCUMENTS} | _stated(documents)
    except KeyError as error:
        raise ValueError(f"{label}: {CONFIG_FILE} is damaged: id2label or documents lacks {error}") from error
    return {**text, "class_names": listed, "multi_label": config.get("problem_type") == _PROBLEM_TYPES[True], **known}


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """What only some trainings state: the column of the text, the thresholds of decisions, the source."""
    return {key: values[key] for key in _STATED if values.get(key) is not None}


def weight_files(folder: Path, label: str) -> list[str]:
    """The names of the files of weights: model.safetensors, or those of the index."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE]
    if not index.is_file():
        raise ValueError(f"{label} has no {WEIGHTS_FILE}: timm and transformers write it with safe_serialization=True")
    names = _shards(index, label)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{label}: {len(missing)} of the {len(names)} files that {INDEX_FILE} lists are missing, such as "
            f"{missing[0]}: copy or download the folder again"
        )
    return names


def _shards(index: Path, label: str) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{label}: {INDEX_FILE} is damaged: it has no weight_map of names to files") from error
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{label}: {INDEX_FILE} names {strange[0]}, which is not in the folder")
    return names


def _read_weights(path: Path, label: str) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{label}: {path.name} is damaged or cut short: {error}") from error
    if metadata.get(CHECKSUM, "") not in ("", checksum(state)):
        raise ValueError(f"{label}: {path.name} is damaged: its weights do not have the checksum that it states")
    return state


def _read_config(path: Path, label: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{label}: {CONFIG_FILE} is damaged, it is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{label}: {CONFIG_FILE} is no dictionary")
    arguments = config.get("model_args")
    # In a file of timm's `save_for_hf` the origin of an image model is among the arguments.
    origin = arguments.get("saved_by", {}) if isinstance(arguments, Mapping) else {}
    if _is_of_timm(config):  # see `_as_written`
        config["model_args"] = {"num_classes": config["num_classes"], **config["model_args"]}
    return {**origin, **config}


def _read_checkpoint(path: Path, weights: str, label: str) -> SavedModel:
    """The model in a checkpoint of `longseq train`, by torch alone."""
    if not path.is_file():
        on_hub = not path.suffix and _HUB_ID.fullmatch(str(path))
        hint = f"; a repository of the hub is {HUB}{path}" if on_hub else ""
        raise ValueError(
            f"{label}: no such file; `longseq train` writes checkpoints/best.ckpt in its output folder{hint}"
        )
    if path.suffix == ".safetensors":
        raise ValueError(f"{label} holds weights alone: give the folder with its {CONFIG_FILE}, {path.parent}")
    if not path.stat().st_size:
        raise ValueError(f"{label} is empty: take another checkpoint of the run, such as last.ckpt")
    if path.name == CONFIG_FILE:
        raise ValueError(f"{label} describes a model without its weights: give the folder, {path.parent}")
    if (other := _other_kind(path)) is not None:
        raise ValueError(
            f"{label} is {other}: give a checkpoint of `longseq train`, such as checkpoints/best.ckpt, or a folder of "
            "save_pretrained"
        )
    if not _is_whole(path):
        raise ValueError(
            f"{label} is damaged, cut short or no checkpoint: take another one of the run, such as last.ckpt"
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError) as error:
        if path.name.endswith(".pth.tar"):
            raise ValueError(
                f"{label} has weights, as timm's train.py writes them, without the model's options: build the model by "
                "timm.create_model(..., checkpoint_path=FILE), and give a folder of its save_pretrained"
            ) from error
        raise ValueError(
            f"{label} is no checkpoint of longseq: it holds other things than tensors and plain containers; "
            "name a file that `longseq train` wrote"
        ) from error
    if not isinstance(checkpoint, dict) or CHECKPOINT_WEIGHTS not in checkpoint:
        raise ValueError(f"{label} holds no Lightning checkpoint: name a file that `longseq train` wrote")
    config = checkpoint.get(CHECKPOINT_CONFIG)
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{label} does not describe its model: it is of another program, of longseq before its first release, or "
            "of a model that is not registered (see longseq.register_kind)"
        )
    averaged = CHECKPOINT_RAW_WEIGHTS in checkpoint
    if weights == "ema" and not averaged:
        raise ValueError(
            f"{label} holds no averaged weights: take weights=model, or train with an average of the weights"
        )
    taken = "ema" if averaged and weights != "model" else "model"
    state = checkpoint[CHECKPOINT_RAW_WEIGHTS if averaged and taken == "model" else CHECKPOINT_WEIGHTS]
    own = {name.removeprefix(CHECKPOINT_PREFIX): value for name, value in state.items() if _is_backbone(name)}
    data = (checkpoint.get(CHECKPOINT_RUN) or {}).get("data") or {}
    reads_documents = all(key in data for key in ("tokenizer", *DOCUMENT_KEYS))
    keys = ("tokenizer", "window", *(DOCUMENT_KEYS if reads_documents else ()))
    text = {key: data.get(key) for key in keys} if data.get("tokenizer") or reads_documents else None
    if text is not None and reads_documents:
        text |= _stated(data)
    return SavedModel(label, config, own, taken, checkpoint, text)


def _is_backbone(name: str) -> bool:
    return name.startswith(CHECKPOINT_PREFIX)


def _other_kind(file: Path) -> str | None:
    """What a file is that is no checkpoint by its contents or its name, damaged or not; None if it may be one."""
    with file.open("rb") as opened:
        start = opened.read(32)
    exported = "an exported file, which holds no model to build again"
    if start.startswith(_ZIP):
        try:
            with ZipFile(file) as archive:
                names = archive.namelist()
        except (BadZipFile, EOFError):
            return None
        # Those of TorchScript; torch.load reads them with two lines of warnings before its error.
        return exported if any(name.endswith(_OF_EXPORTED) for name in names) else None
    if file.suffix == ".onnx":
        return exported
    return None if file.suffix in _CHECKPOINT_SUFFIXES or file.name.endswith(".pth.tar") else "no checkpoint"


def _is_whole(file: Path) -> bool:
    """Whether every part of the archive matches its checksum, which torch.load does not verify."""
    try:
        with ZipFile(file) as archive:
            return archive.testzip() is None
    except (BadZipFile, EOFError):
        return False


def _download(repo_id: str, revision: str | None, token: str | None, cache_dir: str | Path | None) -> Path:
    """The folder of a repository's files of a model in the cache of huggingface_hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(repo_id, name, revision=revision, token=token, cache_dir=cache_dir))

    def has(name: str) -> bool:
        try:
            return bool(fetch(name))
        except (EntryNotFoundError, FileNotFoundError):
            return False

    try:
        folder = fetch(CONFIG_FILE).parent
        if has(INDEX_FILE):
            for name in _shards(folder / INDEX_FILE, repo_id):
                fetch(name)
        else:
            fetch(WEIGHTS_FILE)
        for name in (TOKENIZER_FILE, SETTINGS_FILE, GENERATION_FILE):
            has(name)
    except (EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{repo_id} is no folder or file here, and not on the hub either: {reason}") from error
    return folder


def _floating_type(given: Any) -> torch.dtype:
    """The type of weights that a user has named."""
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={given} is no type of weights: give float32, bfloat16, float16, float64 or auto")
    return dtype


def _type_of(state: Mapping[str, Tensor]) -> torch.dtype | None:
    """The narrowest floating-point type of weights: some stay in float32 in half precision. None without such types."""
    found = {value.dtype for value in state.values() if value.is_floating_point()}
    return min(found, key=lambda dtype: dtype.itemsize, default=None)


def _fill(model: nn.Module, saved: SavedModel) -> None:
    """Load the weights; every key and shape must match."""
    wanted, found = model.state_dict(), saved.state
    if problem := _difference(wanted, found):
        raise ValueError(
            f"{saved.label}: its weights are not those of the {type(model).__name__} that it describes: {problem}; it "
            "was probably written by another version of longseq or timm"
        )
    model.load_state_dict(found)


def _difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """The difference of two sets of weights in names and shapes; empty if there is none."""
    missing, unexpected = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    differing = sorted(key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape)
    parts = [
        f"{len(keys)} {what} ({_some(keys)})"
        for what, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if differing:
        key = differing[0]
        shapes = f"{list(found[key].shape)}, not {list(wanted[key].shape)}"
        parts.append(f"{len(differing)} of another shape ({_some(differing)}; {key} has {shapes})")
    return " and ".join(parts)


def _some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _check_description(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a config.json, read back from its text, describes a model with these weights."""
    read_back = json.loads(json.dumps(config))
    # Not all models of others accept the meta device, on which no weights are initialised.
    with torch.random.fork_rng([]), torch.device("cpu" if config["kind"] in _REBUILD else "meta"):
        described = build(read_back)
    if problem := _difference(described.state_dict(), state):
        raise ValueError(
            f"this {type(described).__name__} was changed after it was built, and its constructor's arguments do not "
            f"describe it any more: {problem}; save the model before the change"
        )


def _separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, copied where two share memory, which safetensors refuses.

    ValueError, in one line, for tensors of other kinds, such as the quantised ones of torchao.
    """
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        if is_traceable_wrapper_subclass(value):
            raise ValueError(
                f"{name} is of {type(value).__name__}, and files hold plain tensors: save the model before its weights "
                "are quantised, and quantise the loaded one"
            )
        tensor = value.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return separate


def _to_plain(value: Any, what: str) -> Any:
    """An argument as JSON types; a model of a kind becomes `{kind, model_args}`."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each, what) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each, what) for each in value]
    if isinstance(value, PretrainedModel):
        assert isinstance(value, nn.Module)
        return {"kind": kind_of(value), **value.describe()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{what} is a {type(value).__name__}, which {CONFIG_FILE} cannot hold")


def _from_plain(value: Any) -> Any:
    """Undo `_to_plain`: a description of a model becomes the model."""
    is_model = isinstance(value, Mapping) and {"kind", "model_args"} <= set(value)
    return build(value) if is_model else value


def _plugins(model: nn.Module) -> list[str]:
    """The plug-ins, or other modules outside longseq, that define the model's class and its mixers."""
    kinds: set[type] = {unsharded_class(part) for part in model.modules() if isinstance(part, Mixer | PretrainedModel)}
    if is_plugin_model(model):
        kinds.add(unsharded_class(model))
    return sorted({plugin_of(kind) or kind.__module__ for kind in kinds if not kind.__module__.startswith("longseq.")})


def _origin(config: Mapping[str, Any]) -> str:
    """The version that wrote a config.json, if it can explain why the file is not understood."""
    this = installed_version()
    version, plugins = config.get("longseq_version", this), config.get("plugins") or ()
    other = "" if version == this else f"; it was saved by longseq {version}, and this is {this}"
    return other + (f"; {', '.join(plugins)} defines parts of it" if plugins else "")
