"""The data sets of tasks: from a folder of the user, or from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

# Builders of the library datasets that read local files, which a task's YAML names.
_LOCAL = ("arrow", "csv", "json", "parquet", "text")
# What `save_to_disk` writes beside the splits or the numbers of a set.
_NO_SPLITS = ("dataset_dict.json", "dataset_info.json", "state.json")
_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Splits(datasets.DatasetDict):
    """The splits of a set. A split that is not there is empty: tasks ask for that of their examples at any number."""

    label: str
    missing: list[str]

    def __missing__(self, name: str) -> datasets.Dataset:
        self.missing.append(name)
        return next(iter(self.values())).select([])

    def complain(self) -> str | None:
        """One line about the splits that were asked for and are not there."""
        if not self.missing:
            return None
        return (
            f"{self.label} has no split {' or '.join(sorted(set(self.missing)))}, which the task takes; it has "
            f"{', '.join(self)}: add it, or give a YAML file of your own that includes the task's and names another"
        )


@contextmanager
def sets_from(root: str | None) -> Iterator[list[Splits]]:
    """While the block runs, tasks find their sets in the folder `root`, or without one where they always do.

    Gives the list of the sets that were read from the folder.

    lm-evaluation-harness calls `datasets.load_dataset` in the constructors of its tasks, of groups and of classes in
    Python alike. No key of a task replaces that for all of them, therefore the function is replaced here.
    """
    if root is not None and not Path(root).is_dir():
        raise ValueError(f"data.root={root} is no folder: give one that holds the data sets of the tasks")
    original = datasets.load_dataset
    found: list[Splits] = []

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        if root is not None and path not in _LOCAL and not Path(path).exists():
            found.append(_read(Path(root), path, name))
            return found[-1]
        try:
            return original(path, name, **options)
        except (OSError, ValueError) as error:
            files = path in _LOCAL or Path(path).exists()
            remedy = "" if files else f": give data.root=FOLDER, where FOLDER/{_place(path, name)} holds it"
            reason = " ".join(str(error).split())
            raise ValueError(f"the data set {_place(path, name)} cannot be read ({reason}){remedy}") from error

    datasets.load_dataset = load
    try:
        yield found
    finally:
        datasets.load_dataset = original


def _place(path: str, name: str | None) -> str:
    return f"{path}/{name}" if name else path


def _read(root: Path, path: str, name: str | None) -> Splits:
    """The set in ROOT/OWNER/NAME or ROOT/NAME, and there in the folder of its configuration."""
    looked = list(dict.fromkeys([root / path, root / path.rpartition("/")[2]]))
    for base in looked:
        if base.is_dir() and (folder := _configuration(base, name)) is not None:
            return _read_folder(folder)
    told = " or ".join(str(base / name if name else base) for base in looked)
    raise ValueError(f"data.root={root} does not hold the set {_place(path, name)} of a task: it would be {told}")


def _configuration(base: Path, name: str | None) -> Path | None:
    """The folder with the splits; a set of one configuration may have it in any folder, or in none."""
    if name is not None:
        return base / name if (base / name).is_dir() else None
    if _splits(base):
        return base
    below = [folder for folder in base.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    return below[0] if len(below) == 1 else None


def _splits(folder: Path) -> dict[str, Path]:
    """The splits of a folder: saved sets, or files whose names are those of the splits."""
    saved = {path.parent.name: path.parent for path in sorted(folder.glob("*/state.json"))}
    files = {
        path.stem: path for path in sorted(folder.iterdir()) if path.suffix in _FILES and path.name not in _NO_SPLITS
    }
    return {**files, **saved}


def _read_folder(folder: Path) -> Splits:
    splits = {}
    try:
        for name, path in _splits(folder).items():
            if path.is_dir():
                splits[name] = datasets.load_from_disk(str(path))
            else:
                splits[name] = datasets.load_dataset(_FILES[path.suffix], data_files=str(path), split="train")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} cannot be read: {' '.join(str(error).split())}") from error
    if not splits:
        raise ValueError(f"{folder} holds no saved set, and no SPLIT.jsonl, .json, .csv or .parquet")
    whole = Splits(splits)
    whole.label, whole.missing = str(folder), []
    return whole
