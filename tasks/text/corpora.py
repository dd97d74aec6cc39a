"""The corpora that the keys of `data` name: prepared tokens, or text that is prepared at its first use."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from longseq.hub import find_source
from longseq.models import read
from longseq.tasks.report import long_step, shorten
from longseq.tasks.text.documents import Fractions
from longseq.tasks.text.keys import TextDataKeys
from longseq.tasks.text.prepare import describe, plan_of, prepare
from longseq.tasks.text.sources import STREAM, TEXT, Columns, Part, find_parts, group_files
from longseq.tasks.text.store import MANIFEST, TokenStore, open_store
from longseq.tasks.training.system import write_text
from longseq.tokenizer_files import TOKENIZER_FILE, tokenizer_files

_log = logging.getLogger(__name__)

_FRACTION = 0.05  # the default share of validation and of test

# Folders of Python's modules that are left out.
_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "__pycache__", "site-packages", "dist-packages"}


def open_corpora(keys: TextDataKeys) -> list[TokenStore]:
    """One corpus for each entry of `data.root`, or the only one."""
    fractions = fractions_of(keys)
    if keys.source == "standard_library":
        parts = list(group_files(standard_library_files(), format="python"))
        return [_prepared(keys.source, parts, TEXT, fractions, keys)]
    roots = [keys.root] if isinstance(keys.root, str) else keys.root or []
    if keys.source == "tokens":
        return [open_store(root, check=keys.check) for root in roots]
    columns = Columns(keys.column or TEXT.text, keys.prompt_column)
    stores = []
    for root in roots:
        path = root if root.startswith(STREAM) else os.path.realpath(root)
        stores.append(_prepared(Path(root).resolve().stem, find_parts([path], columns), columns, fractions, keys))
    return stores


def tokenizer_of(init: str | None) -> Mapping[str, Any] | None:
    """The tokenizer of a checkpoint, folder or repository of the hub; None without one that reads text."""
    saved = None if init is None else read(find_source(init), label=f"init={init}")
    return None if saved is None else (saved.text or {}).get("tokenizer")


def keep_tokenizer(tokenizer: Mapping[str, Any], cache: str | None) -> str:
    """The value of `data.tokenizer` for a model's tokenizer: `bytes`, or a folder in the cache with its files."""

    def write(folder: Path) -> None:
        for name, text in reversed(tokenizer_files(tokenizer).items()):  # tokenizer.json last
            write_text(folder / name, text)

    is_bytes = tokenizer["kind"] == "bytes"
    return "bytes" if is_bytes else str(in_cache("tokenizer", dict(tokenizer), cache, TOKENIZER_FILE, write))


def fractions_of(keys: TextDataKeys) -> dict[str, float]:
    """The shares of validation and test, for text that is not prepared yet."""
    shares = {"validation": keys.validation, "test": keys.test}
    return {split: _FRACTION if share is None else share for split, share in shares.items()}


def in_cache(name: str, plan: Any, cache: str | None, file: str, write: Callable[[Path], Any]) -> Path:
    """The folder in the cache for `plan`, which determines its content; `write` fills it, and makes `file` last.

    `cache` is by default longseq/text in the user's cache (XDG_CACHE_HOME). One process writes while others wait.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longseq" / "text"
    base = default if cache is None else Path(cache)
    folder = base / f"{name}_{hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with long_step(f"preparing {name} in {shorten(folder)}"), FileLock(base / f"{folder.name}.lock"):
        if not (folder / file).exists():
            write(folder)
    return folder


def _prepared(
    name: str, parts: Sequence[Part], columns: Columns, fractions: Fractions, keys: TextDataKeys
) -> TokenStore:
    """The tokens of text, prepared unless the cache has them."""
    tokenizer = keys.tokenizer or "bytes"

    def write(folder: Path) -> None:
        manifest = prepare(
            parts, folder, columns=columns, tokenizer=tokenizer, separator=keys.separator, fractions=fractions
        )
        if manifest["malformed"]:
            _log.warning("%s: %s", name, describe(manifest))

    plan = plan_of(parts, columns, tokenizer, keys.separator, fractions)
    return open_store(in_cache(name, plan, keys.cache, MANIFEST, write), check=keys.check)


def standard_library_files() -> list[str]:
    """The modules of the standard library of this Python, without tests and idlelib, in the order of their paths."""
    return sorted(modules_of(sysconfig.get_paths()["stdlib"]))


def modules_of(root: str) -> Iterator[str]:
    """The Python files below a folder, without installed packages and tests."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))
