"""`longseq prepare`: text becomes a folder of tokens (see `longseq.tasks.text.store`).

Processes encode the parts of the input in parallel, and one writes them in the order of the input, without duplicates.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from longseq.files import crc32_of
from longseq.tasks.commands import Prepare
from longseq.tasks.report import long_step, progress_bar, quiet_libraries, shorten
from longseq.tasks.text.documents import KEPT, Fractions, encode_parts, hashes_of, split_numbers
from longseq.tasks.text.sources import TEXT, Columns, Malformed, Part, find_parts, read_part
from longseq.tasks.text.store import MANIFEST, SPLITS, TOKENIZER, VERSION, SplitWriter, file_types, stamp
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

    `processes` read and encode, by default one for each core that this process can use. ValueError if the folder has
    tokens already, or the input no document.
    """
    if (output / MANIFEST).exists():
        raise ValueError(f"{output} holds prepared tokens already")
    output.mkdir(parents=True, exist_ok=True)
    if (size := trained_size(tokenizer)) is not None:
        with long_step("training the tokenizer"):
            chosen: Tokenizer = train_tokenizer(_training_texts(parts, columns, fractions), size)
    else:
        chosen = read_tokenizer(tokenizer, separator)
    has_prompts = columns.prompt is not None
    types = file_types(chosen.vocab_size, prompts=has_prompts)
    writers = {split: SplitWriter(output, split, types) for split in SPLITS}
    counts: Counter[str] = Counter()
    malformed: list[str] = []
    seen: set[bytes] = set()  # the hashes of all documents
    processes = min(processes or usable_cores(), len(parts))
    with progress_bar("encoding", len(parts)) as advance:
        for encoded, found, lines in encode_parts(parts, processes, columns, chosen.to_dict()):
            counts += found
            malformed += lines
            kept = np.zeros(len(encoded.hashes), bool)  # of equal documents, the first
            for index, row in enumerate(encoded.hashes):
                digest = row.tobytes()
                kept[index] = digest not in seen
                seen.add(digest)
            numbers = split_numbers(encoded.hashes, fractions)
            for number, split in enumerate(SPLITS):
                here = kept & (numbers == number)
                prompts = {"prompts": encoded.prompts[here]} if has_prompts else {}
                tokens = encoded.tokens[np.repeat(here, encoded.lengths)]
                writers[split].add(tokens, encoded.lengths[here], encoded.byte_counts[here], **prompts)
            advance(1)
    if not seen:
        raise ValueError(f"the input holds no document, {counts['malformed']} malformed lines: {malformed[:1]}")
    manifest = {
        **manifest_of(chosen, output),
        "fractions": dict(fractions),
        "counts": {
            "documents": len(seen),
            "duplicates": counts["documents"] - len(seen),
            "empty": counts["empty"],
            "malformed": counts["malformed"],
        },
        "splits": {split: writer.close() for split, writer in writers.items()},
        "malformed": malformed[:KEPT],
    }
    write_text(output / MANIFEST, json.dumps(manifest, indent=1) + "\n")
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
            if split_numbers(hashes_of([document]), fractions)[0] == SPLITS.index("train"):
                yield document.prompt + document.text
                left -= len(document.text)
                if left <= 0:
                    return


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
