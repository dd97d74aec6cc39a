"""What the scripts here share as commands: `--help`, and one line in place of a traceback for what a user can mend."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HELP = ("-h", "--help")


def run_script(main: Callable[[], Any], usage: str | None, *, most: int | None = None, gpu: str | None = None) -> None:
    """Run `main` of a script. Files that cannot be read and values that do not fit end it in one line.

    Args:
        usage: the docstring of the script, which `--help` prints, and a call with more than `most` arguments.
        gpu: what the script does with a GPU, without which it ends.
    """
    assert usage is not None
    words = sys.argv[1:]
    if any(word in HELP for word in words):
        print(usage.strip())
        return
    if most is not None and len(words) > most:
        sys.exit(usage)
    if gpu is not None and not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name} {gpu}, and torch sees no CUDA device")
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.filename or Path(sys.argv[0]).name}: {error.strerror or error}")
    except ValueError as error:
        sys.exit(str(error))


def read_json(file: Path, keys: Sequence[str] = ("rows",)) -> Any:
    """The object in a JSON file. ValueError if it is none, or lacks a key."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: no JSON ({error})") from error
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing:
        raise ValueError(f"{file}: it has no {', '.join(missing)}, so it is no result of this kind")
    return found
