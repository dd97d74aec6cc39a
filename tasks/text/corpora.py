"""The corpora that the keys of `data` name: prepared tokens, or text that is prepared at its first use."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from longseq.tasks.data.folders import refuse_inside
from longseq.tasks.text.documents import Document, Fractions, encode, store_of
from longseq.tasks.text.keys import TextDataKeys
from longseq.tasks.text.prepare import count_left_out, plan_of, prepare
from longseq.tasks.text.python_sources import installed_files, standard_library_files
from longseq.tasks.text.sources import DATA_KEYS, STREAM, TEXT, Columns, Part, find_parts, group_files, read_part
from longseq.tasks.text.store import MANIFEST, SPLITS, TokenStore, open_store, read_manifest
from longseq.tasks.text.tokenizer import ByteTokenizer

_log = logging.getLogger(__name__)

_FRACTION = 0.05


def open_corpora(keys: TextDataKeys) -> list[TokenStore]:
    """One corpus for each entry of `data.root`, or the only one. Raises ValueError for errors of the user."""
    fractions = fractions_of(keys)
    if keys.source == "standard_library":
        return [_standard_library(fractions)]
    if keys.source == "python_sources":
        return [
            _prepared("python_sources", list(group_files(installed_files(), format="python")), TEXT, fractions, keys)
        ]
    roots = require_roots(keys)
    places = [os.path.realpath(root) for root in roots]
    if twice := next((root for root, place in zip(roots, places, strict=True) if places.count(place) > 1), None):
        _log.warning(
            "data.root names %s more than once, and so often it is read, in validation and test too: name each once; "
            "data.weights=[...] says how often the training reads each",
            twice,
        )
    if keys.source == "tokens":
        return [_open_tokens(root, check=keys.check) for root in roots]
    refuse_inside(cache_folder() if keys.cache is None else keys.cache, roots, "data.cache")
    columns = Columns(keys.column or TEXT.text, keys.prompt_column, keys=DATA_KEYS)
    return [
        _prepared(Path(root).resolve().stem, find_parts([_absolute(root)], columns), columns, fractions, keys)
        for root in roots
    ]


def fractions_of(keys: TextDataKeys) -> dict[str, float]:
    """The shares of the documents that are set apart for validation and test, of text that is not prepared."""
    shares = {"validation": keys.validation, "test": keys.test}
    return {split: _FRACTION if share is None else share for split, share in shares.items()}


def require_roots(keys: TextDataKeys) -> list[str]:
    """The entries of `data.root`. ValueError, in one line, for one that is not there, or is not prepared."""
    roots = [keys.root] if isinstance(keys.root, str) else keys.root or []
    for root in roots:
        if keys.source == "tokens":
            read_manifest(Path(root))
        elif not root.startswith(STREAM) and not os.path.exists(root):
            raise ValueError(f"data.root={root} does not exist")
    return roots


def _open_tokens(root: str, *, check: bool) -> TokenStore:
    store = open_store(root, check=check)
    if lacking := [split for split in SPLITS if split not in store.splits]:
        raise ValueError(
            f"data.root={root} has no split {lacking[0]}, but {', '.join(store.splits)}: it was not prepared for "
            "task=lm; give a folder that `longseq prepare task=lm` has written"
        )
    if store.tokenizer["kind"] == "bare":
        raise ValueError(
            f"data.root={root} was made without a tokenizer: its tokens stand for no text, which task=lm writes and "
            "measures; give a folder that `longseq prepare task=lm` has written"
        )
    return store


def _absolute(root: str) -> str:
    return root if root.startswith(STREAM) else os.path.realpath(root)


def cache_folder() -> Path:
    """The folder of text that was prepared for training: longseq/text in the user's cache (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "longseq" / "text"


def _standard_library(fractions: Fractions) -> TokenStore:
    """The bytes of the standard library's modules, in memory."""
    tokenizer, parts = ByteTokenizer(), group_files(standard_library_files(), format="python")
    documents = (
        one for part in parts for one in read_part(part, TEXT) if isinstance(one, Document) and not one.is_empty
    )
    return store_of("standard_library", encode(documents, tokenizer, fractions), tokenizer, fractions)


def _prepared(
    name: str, parts: Sequence[Part], columns: Columns, fractions: Fractions, keys: TextDataKeys
) -> TokenStore:
    """The tokens of text, from the cache if it has them. Otherwise one process prepares them while the others wait."""
    tokenizer = keys.tokenizer or "bytes"
    plan = plan_of(parts, columns, tokenizer, keys.separator, fractions)
    known = hashlib.sha256(plan.encode()).hexdigest()[:16]
    base = cache_folder() if keys.cache is None else Path(keys.cache)
    output = base / f"{name}_{known}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        opened = (base / f"{output.name}.lock").open("w")
    except OSError as error:
        raise ValueError(f"{base} cannot be written ({error.strerror}): give data.cache=FOLDER") from error
    with opened as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / MANIFEST).exists():
            _log.info("preparing %s in %s", name, output)
            manifest = prepare(
                parts,
                output,
                columns=columns,
                tokenizer=tokenizer,
                separator=keys.separator,
                fractions=fractions,
            )
            if left := count_left_out(manifest, ("duplicates", "empty")):
                _log.warning("of %s are left out: %s", name, left)
            if manifest["lost"] is not None:
                _log.warning("%s: %s", name, manifest["lost"])
            if count := manifest["counts"]["malformed"]:
                _log.warning(
                    "%d lines or files of %s could not be read and are left out, such as %s",
                    count,
                    name,
                    manifest["malformed"][0],
                )
    return open_store(output, check=keys.check)
