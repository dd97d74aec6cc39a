"""The data sets of tasks: from a folder of the user, or from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

# Builders of the library datasets that read local files, which a task's YAML names.
_LOCAL = ("arrow", "csv", "json", "parquet", "text")
# What `save_to_disk` writes next to the splits.
_NO_SPLITS = ("dataset_dict.json", "dataset_info.json", "state.json")
_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Splits(datasets.DatasetDict):
    """The splits of a set. A missing split is empty: tasks open the split of their examples even if they show none."""

    def __missing__(self, name: str) -> datasets.Dataset:
        return next(iter(self.values())).select([])


@contextmanager
def sets_from(root: str | None) -> Iterator[None]:
    """While the block runs, tasks find their sets in the folder `root`, or without one where they always do.

    lm-evaluation-harness calls `datasets.load_dataset` in the constructors of its tasks, of groups and of classes in
    Python alike. No key of a task replaces that for all of them, therefore the function is replaced here.
    """
    original = datasets.load_dataset

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        if root is None or path in _LOCAL or Path(path).exists():
            return original(path, name, **options)
        return _read(_find(Path(root), path, name))

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = original


def _find(root: Path, path: str, name: str | None) -> Path:
    """The folder with the splits: ROOT/OWNER/NAME or ROOT/NAME, and there the folder of the configuration `name`."""
    for base in (root / path, root / path.rpartition("/")[2]):
        if name is not None and (base / name).is_dir():
            return base / name
        if name is None and base.is_dir():
            below = [folder for folder in base.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
            return base if _splits(base) or len(below) != 1 else below[0]
    raise FileNotFoundError(f"{root} does not hold the data set {path} {name or ''}".rstrip())


def _splits(folder: Path) -> dict[str, Path]:
    """The splits of a folder: saved sets, or files named after the splits."""
    saved = {path.parent.name: path.parent for path in sorted(folder.glob("*/state.json"))}
    files = {
        path.stem: path for path in sorted(folder.iterdir()) if path.suffix in _FILES and path.name not in _NO_SPLITS
    }
    return {**files, **saved}


def _read(folder: Path) -> Splits:
    splits = Splits()
    for name, path in _splits(folder).items():
        if path.is_dir():
            splits[name] = datasets.load_from_disk(str(path))
        else:
            splits[name] = datasets.load_dataset(_FILES[path.suffix], data_files=str(path), split="train")
    return splits
