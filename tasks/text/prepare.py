"""`longseq prepare`: text becomes a folder of tokens (see `longseq.tasks.text.store`).

Processes encode the parts of the input in parallel, each part into a file below OUTPUT/.partial. When all parts are
done, one process joins them in the order of the input, without duplicates. The same command continues an interrupted
one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from omegaconf import DictConfig

from longseq.files import crc32_of
from longseq.tasks.commands import Prepare
from longseq.tasks.report import long_step, progress_bar, quiet_libraries, shorten
from longseq.tasks.text import documents
from longseq.tasks.text.documents import Encoded, Fractions
from longseq.tasks.text.sources import TEXT, Columns, Malformed, Part, find_parts, read_part
from longseq.tasks.text.store import MANIFEST, PARTIAL, SPLITS, TOKENIZER, VERSION, SplitWriter, file_types, stamp
from longseq.tasks.text.tokenizer import Tokenizer, read_tokenizer, train_tokenizer, trained_size
from longseq.tasks.training.configuration import command_word, read_command
from longseq.tasks.training.system import usable_cores, write_text
from longseq.tokenizer_files import SETTINGS_FILE

# Characters of text from which a tokenizer is trained. More take long and change the tokenizer little.
TRAINING_TEXT = 1 << 28


@quiet_libraries()
def run(cfg: DictConfig) -> None:
    """Prepare text as configured, and print a summary."""
    keys = read_command(Prepare, cfg)
    assert keys.input is not None
    assert keys.output is not None
    columns = Columns(keys.column, keys.prompt_column)
    inputs = [keys.input] if isinstance(keys.input, str) else keys.input
    manifest = prepare(
        find_parts(inputs, columns, whole_files=keys.whole_files),
        Path(keys.output),
        columns=columns,
        tokenizer=keys.tokenizer,
        separator=keys.separator,
        fractions={"validation": keys.validation, "test": keys.test},
        processes=keys.processes,
    )
    print(describe(manifest))
    print(f"longseq train task=lm data=tokens {command_word('data.root', shorten(keys.output))}")


def describe(manifest: Mapping[str, Any]) -> str:
    """The counts of a manifest, and the first malformed lines."""
    splits = ", ".join(
        f"{split} {counts['documents']:,} documents of {counts['tokens']:,} tokens"
        for split, counts in manifest["splits"].items()
    )
    counts = manifest["counts"]
    left_out = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("duplicates", "empty", "malformed") if counts[kind])
    return "\n".join([splits, *([f"left out: {left_out}"] if left_out else []), *manifest["malformed"][:3]])


def prepare(
    parts: Sequence[Part],
    output: Path,
    *,
    columns: Columns = TEXT,
    tokenizer: str = "bytes",
    separator: str | None = None,
    fractions: Fractions,
    processes: int | None = None,
) -> dict[str, Any]:
    """Write the tokens of `parts` to the folder `output`; returns its manifest.

    `processes` read and encode, by default one for each core that this process can use.

    ValueError if the folder has tokens already or the input no document; filelock.Timeout if another process writes.
    """
    if (output / MANIFEST).exists():
        raise ValueError(f"{output} holds prepared tokens already")
    plan = json.dumps(plan_of(parts, columns, tokenizer, separator, fractions))
    partial = output / PARTIAL / hashlib.sha256(plan.encode()).hexdigest()[:16]
    partial.mkdir(parents=True, exist_ok=True)
    with FileLock(output / PARTIAL / "lock", timeout=0):
        choice = tokenizer
        if (size := trained_size(tokenizer)) is not None:
            choice = str(partial / TOKENIZER)
            if not os.path.exists(choice):
                with long_step("training the tokenizer"):
                    trained = train_tokenizer(_training_texts(parts, columns, fractions), size)
                write_text(Path(choice), trained.to_dict()["json"])
        chosen = read_tokenizer(choice, separator if size is None else None)
        waiting = {
            index: part for index, part in enumerate(parts) if not documents.encoded_path(partial, index).exists()
        }
        processes = min(processes or usable_cores(), len(waiting))
        with progress_bar("encoding", len(parts), done=len(parts) - len(waiting)) as advance:
            for _ in documents.encode_parts(waiting, processes, partial, columns, chosen.to_dict()):
                advance(1)
        counts = dict(zip(documents.COUNTS, sum(_arrays(partial, len(parts), "counts")).tolist(), strict=True))
        malformed = np.concatenate(_arrays(partial, len(parts), "malformed")).tolist()[: documents.KEPT]
        if counts["documents"] == 0:
            raise ValueError(f"the input holds no document, {counts['malformed']} malformed lines: {malformed[:1]}")
        manifest = _join(len(parts), chosen, fractions, partial, output)
        manifest["counts"] |= {name: counts[name] for name in ("empty", "malformed")}
        manifest["malformed"] = malformed
        write_text(output / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(output / PARTIAL)
    return manifest


def plan_of(
    parts: Sequence[Part], columns: Columns, tokenizer: str, separator: str | None, fractions: Fractions
) -> dict[str, Any]:
    """Everything that determines the tokens of a preparation; files are identified by their sizes and times."""
    files: list[str] = []
    if tokenizer != "bytes" and trained_size(tokenizer) is None:
        # The settings next to a tokenizer file name its end-of-text token.
        settings = [] if os.path.isdir(tokenizer) else [str(Path(tokenizer).with_name(SETTINGS_FILE))]
        files = [tokenizer, *settings]
    return {
        "version": VERSION,
        "parts": [[*part, part.stamps()] for part in parts],
        "columns": [columns.text, columns.prompt],
        "tokenizer": [tokenizer, separator, *map(stamp, files)],
        "fractions": dict(fractions),
    }


def _training_texts(parts: Sequence[Part], columns: Columns, fractions: Fractions) -> Iterator[str]:
    """Texts of the training split, from parts all over the input."""
    left = TRAINING_TEXT
    # Parts far from each other come first: 0, n/2, n/4, 3n/4, ...
    bits = max(1, (len(parts) - 1).bit_length())
    order = sorted(range(len(parts)), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    for index in order:
        for document in read_part(parts[index], columns):
            if isinstance(document, Malformed) or document.is_empty:
                continue
            if documents.split_numbers(documents.hashes_of([document]), fractions)[0] == SPLITS.index("train"):
                yield document.prompt + document.text
                left -= len(document.text)
                if left <= 0:
                    return


def _arrays(partial: Path, count: int, name: str) -> list[Any]:
    """One of the arrays of each part."""
    found = []
    for index in range(count):
        with np.load(documents.encoded_path(partial, index)) as arrays:
            found.append(arrays[name])
    return found


def _join(count: int, tokenizer: Tokenizer, fractions: Fractions, partial: Path, output: Path) -> dict[str, Any]:
    """Write the files of all splits; returns the manifest."""
    kept = documents.first_of_equal(np.concatenate(_arrays(partial, count, "hashes")))
    has_prompts = any(prompts.any() for prompts in _arrays(partial, count, "prompts"))
    types = file_types(tokenizer.vocab_size, prompts=has_prompts)
    writers = {split: SplitWriter(output, split, types) for split in SPLITS}
    done = 0
    with progress_bar("joining", count) as advance:
        for index in range(count):
            with np.load(documents.encoded_path(partial, index)) as arrays:
                encoded = Encoded(**{name: arrays[name] for name in Encoded._fields})
            numbers = documents.split_numbers(encoded.hashes, fractions)
            here = kept[done : done + len(numbers)]
            done += len(numbers)
            for number, split in enumerate(SPLITS):
                chosen = here & (numbers == number)
                prompts = {"prompts": encoded.prompts[chosen]} if has_prompts else {}
                tokens = encoded.tokens[np.repeat(chosen, encoded.lengths)]
                writers[split].add(tokens, encoded.lengths[chosen], encoded.byte_counts[chosen], **prompts)
            advance(1)
    return {
        **manifest_of(tokenizer, output),
        "fractions": dict(fractions),
        "counts": {"documents": int(kept.sum()), "duplicates": int((~kept).sum())},
        "splits": {split: writer.close() for split, writer in writers.items()},
    }


def manifest_of(tokenizer: Any, output: Path) -> dict[str, Any]:
    """The version and the tokenizer (or `Bare`), for a manifest; the tokenizer's file is written to `output`."""
    described = tokenizer.to_dict()
    manifest: dict[str, Any] = {
        "version": VERSION,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "tokenizer": {key: value for key, value in described.items() if key != "json"},
    }
    if described["kind"] == "file":
        path = output / TOKENIZER
        write_text(path, described["json"])
        manifest["tokenizer_file"] = {"size": path.stat().st_size, "crc32": crc32_of(path)}
    return manifest
