"""The files of a model in a repository of the Hugging Face hub, and their names."""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from longseq.tokenizer_files import GENERATION_FILE, SETTINGS_FILE, TOKENIZER_FILE

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CARD_FILE = "README.md"

# The prefix of a repository where a path could be given, as in timm.
HUB = "hf-hub:"


def find_source(
    source: str | Path, revision: str | None = None, token: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The file or folder of a model: `source`, or hf-hub:OWNER/NAME@REVISION in the hub's cache.

    A revision in `source` comes before the argument. Errors come from huggingface_hub.
    """
    if not is_on_hub(source):
        return Path(source)
    from huggingface_hub import snapshot_download

    repo_id, _, named = str(source).removeprefix(HUB).partition("@")
    names = [CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, SETTINGS_FILE, GENERATION_FILE, "model*.safetensors"]
    revision = named or revision
    folder = snapshot_download(repo_id, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=names)
    return Path(folder)


def is_on_hub(source: str | Path) -> bool:
    """True for hf-hub:OWNER/NAME, unless a file or folder has this name."""
    return str(source).startswith(HUB) and not Path(source).exists()


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each weight, by the index of a folder with several files; None for model.safetensors alone."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return None
    return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])


def weight_files(folder: Path) -> list[str]:
    """The names of the files of weights."""
    places = weight_map(folder)
    return [WEIGHTS_FILE] if places is None else sorted(set(places.values()))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, each from the file that the index names. KeyError for one that this file lacks."""
    places = weight_map(folder)
    if places is None:
        return load_file(folder / WEIGHTS_FILE)
    files = {name: load_file(folder / name) for name in set(places.values())}
    return {name: files[place][name] for name, place in places.items()}
