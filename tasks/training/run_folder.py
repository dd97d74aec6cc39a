"""The names that a run writes into its folder, and the check that none of them is taken by another program's file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from longseq.files import check_above, check_name
from longseq.tasks.training import automatic, runs, targets
from longseq.tasks.training.configuration import Config
from longseq.tasks.training.learning_rate_finder import COLUMNS, PICTURE, TABLE
from longseq.tasks.training.logger import logger_entries

# The sections of a run's configuration, by which its file is told from another program's of the same name.
SECTIONS = ("task", "data", "recipe", "model", "trainer")
# What Lightning's loggers write below their `save_dir`; callbacks and loggers of ours state their `FILES`.
_OF_LIGHTNING = {"CSVLogger": ("metrics.csv", "hparams.yaml"), "TensorBoardLogger": ("events.out.tfevents.*",)}


def check_output(output: Any) -> None:
    """Raise ValueError, in one line, for a name that no run folder can have. Other types than text are the keys'."""
    if output is None or output == "":
        raise ValueError("output is empty: give output=FOLDER, or leave it out")
    if not isinstance(output, str):
        return
    if Path(output) == Path("/"):
        raise ValueError(f"output={output} is no folder of a run's own: give output=FOLDER, a new one")
    check_name(Path(output), "output")
    if os.path.exists(output) and not os.path.isdir(output):
        raise ValueError(f"output={output} is a file: give output=FOLDER, or leave it out")
    check_above(Path(output), "output")
    if os.path.islink(output) and not os.path.exists(output):
        raise ValueError(f"output={output} is a link to nothing: make {os.path.realpath(output)}, or remove the link")


def check_folder(config: Config, *, log: Path | None, tables: Sequence[str]) -> None:
    """Raise ValueError, in one line, where a run would replace or continue a file that no run of longseq wrote.

    The folder of the command, `output=.` by any name, must be empty, too, or a run's. Files in a hidden place do not
    count.

    A folder with a run's configuration or checkpoint is a run's, with all that is in it. Files that a run does not
    write may stand in its folder. `log` is the log of the command, `tables` are the files of the task's report.
    """
    folder = Path(config["output"])
    if _holds_run(folder):
        return
    if folder.resolve() == Path.cwd().resolve():  # where the files of the run would lie among all others
        others = sorted(path.name for path in folder.iterdir() if _is_noticed(path) and path.name != (log and log.name))
        if others:
            raise ValueError(
                f"output={config['output']} is the folder in which the command starts, and it holds other files, such "
                f"as {others[0]}: give output=FOLDER, a new one, or start in an empty folder"
            )
    taken = [
        path
        for place, pattern in _written(config, folder, tables)
        for path in sorted(place.glob(pattern) if "*" in pattern else [place / pattern])
        if _is_taken(path)
    ]
    # A shell has made an empty log where what the command prints goes there, too.
    taken += [log] if log is not None and log.is_file() and log.stat().st_size else []
    if taken:
        names = [os.path.relpath(path, folder) for path in dict.fromkeys(taken)]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(
            f"output={folder} holds {shown}, which no run of longseq wrote and this one would write: choose another "
            "output, or move them away"
        )


def _written(config: Config, folder: Path, tables: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Each place where a run of this configuration writes, and the name or pattern of names that it writes there."""
    yield from ((folder, name) for name in (runs.CONFIG_FILE, runs.METRICS_FILE, runs.MODEL_FOLDER, *tables))
    if automatic.searches(config) and not _is_curve(folder / TABLE):
        yield from ((folder, name) for name in (TABLE, PICTURE))
    parts = {f"callbacks.{name}": (options, targets.CALLBACKS) for name, options in config["callbacks"].items()}
    parts |= {key: (options, targets.LOGGERS) for key, options in logger_entries(config.get("logger")).items()}
    for key, (options, known) in parts.items():
        place = _place_of(options) if options else None
        if place is not None:
            part = targets.find(options, known, key)
            files = _OF_LIGHTNING.get(part.__name__, ()) if part.__module__.startswith("lightning.") else ()
            yield from ((place, file) for file in getattr(part, "FILES", files))


def _place_of(options: Mapping[str, Any]) -> Path | None:
    """The folder in which a callback or a logger writes; None where it has none, or a new one each time."""
    folder = next((options[key] for key in targets.FOLDERS if options.get(key)), None)
    wanted = ("name", "version") if "save_dir" in options else ()
    inner = [value for key in wanted if isinstance(value := options.get(key), str)]
    return None if folder is None or len(inner) < len(wanted) else Path(folder, *inner)


def _is_curve(table: Path) -> bool:
    """True for the table of a search, which a run writes before its configuration."""
    return table.is_file() and table.read_bytes().startswith(COLUMNS.encode())


def _holds_run(folder: Path) -> bool:
    """True if a folder has the configuration or the checkpoint of a run."""
    try:
        content = yaml.safe_load((folder / runs.CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        content = None
    if isinstance(content, Mapping) and all(isinstance(content.get(section), Mapping) for section in SECTIONS):
        return True
    last = runs.newest_checkpoint(folder)
    return last is not None and runs.saved_config(last) is not None


def _is_noticed(path: Path) -> bool:
    """True for a file with something in it, and for a folder with a file; False for those that are hidden.

    Hydra makes the folder of a run before it is known that the run writes to another one.
    """
    if path.name.startswith("."):
        return False
    if path.is_dir():
        return any(not inner.is_dir() for inner in path.rglob("*"))
    return not path.is_file() or path.stat().st_size > 0


def _is_taken(path: Path) -> bool:
    """True for a file, a folder with something in it, and whatever else has this name."""
    return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))
