"""`longseq prepare`: text becomes a folder of tokens (see `longseq.tasks.text.store`).

Processes encode the parts of the input in parallel, each part into a file below OUTPUT/.partial. When all parts are
done, one process joins them in the order of the input, without duplicates. After an interruption the same command
continues.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from longseq.files import crc32_of
from longseq.tasks.data.folders import refuse_inside
from longseq.tasks.data.stamps import stamp
from longseq.tasks.report import progress_bar, quiet_libraries, shorten
from longseq.tasks.text.documents import (
    Encoded,
    Fractions,
    LineCounter,
    Place,
    first_of_equal,
    gzip_bits,
    hashes_of,
    split_numbers,
)
from longseq.tasks.text.encoded_parts import (
    KEPT,
    encode_part,
    encode_side_by_side,
    encoded_path,
    read_array,
    told_path,
)
from longseq.tasks.commands import Prepare
from longseq.tasks.text.round_trip import describe_loss
from longseq.tasks.text.sources import READING, TEXT, Columns, Malformed, Part, find_parts, read_part, refuse_columns
from longseq.tasks.text.store import (
    MANIFEST,
    PARTIAL,
    SPLITS,
    TOKENIZER,
    VERSION,
    SplitWriter,
    file_types,
)
from longseq.tasks.text.tokenizer import (
    Tokenizer,
    read_tokenizer,
    refuse_separator,
    train_tokenizer,
    trained_size,
)
from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.configuration import command_word
from longseq.tasks.training.files import write_text
from longseq.tasks.training.lock import locked
from longseq.tasks.training.processes import usable_cores
from longseq.tokenizer_files import SETTINGS_FILE

# Bytes of text from which a tokenizer is trained. More text takes long and changes the tokenizer little.
TRAINING_TEXT = 1 << 28

_NAMED = 3  # lines and files that could not be read, in what the command prints

# What is left out, in the counts of a manifest and in words.
_LEFT_OUT = {"duplicates": "duplicates", "empty": "empty documents", "malformed": "malformed"}


@quiet_libraries()
def run(cfg: DictConfig) -> None:
    """Prepare text as configured, and print a summary."""
    keys = read_command(Prepare, cfg)
    assert keys.input is not None
    assert keys.output is not None
    columns = Columns(keys.column, keys.prompt_column)
    inputs = [keys.input] if isinstance(keys.input, str) else keys.input
    refuse_inside(keys.output, inputs)
    parts = find_parts(inputs, columns, whole_files=keys.whole_files)
    refuse_columns(columns, parts)
    manifest = prepare(
        parts,
        Path(keys.output),
        columns=columns,
        tokenizer=keys.tokenizer,
        separator=keys.separator,
        fractions={"validation": keys.validation, "test": keys.test},
        processes=keys.processes,
    )
    print(describe(manifest))
    asked, found = trained_size(keys.tokenizer), manifest["vocab_size"]
    if asked is not None and found < asked:
        print(f"the vocabulary has {found:,} tokens and not {asked:,}: the text has no more pairs")
    print(f"longseq train task=lm data=tokens {command_word('data.root', shorten(keys.output))}")


def describe(manifest: Mapping[str, Any]) -> str:
    """The counts of a manifest, the first lines that could not be read, and what the tokenizer loses."""
    splits = ", ".join(
        f"{split} {told['documents']:,} documents of {told['tokens']:,} tokens"
        for split, told in manifest["splits"].items()
    )
    left = count_left_out(manifest)
    named = manifest["malformed"]
    lines = [splits, *([f"left out: {left}"] if left else []), *named[:_NAMED]]
    if (count := manifest["counts"]["malformed"]) > _NAMED:
        which = "all" if len(named) == count else f"the first {len(named):,}"
        lines.append(f"and {count - _NAMED:,} more, {which} named in {MANIFEST}")
    if manifest["lost"] is not None:
        lines.append(manifest["lost"])
    for split in ("validation", "test"):
        if manifest["splits"][split]["documents"] == 0:
            lines.append(f"{split} has no document, which training needs: prepare again with a larger {split}=FRACTION")
    return "\n".join(lines)


def count_left_out(manifest: Mapping[str, Any], kinds: Sequence[str] = tuple(_LEFT_OUT)) -> str:
    """What was left out of the input, in words; nothing where all of it was taken."""
    counts = manifest["counts"]
    return ", ".join(f"{counts[kind]:,} {_LEFT_OUT[kind]}" for kind in kinds if counts[kind])


def prepare(
    parts: Sequence[Part],
    output: Path,
    *,
    columns: Columns = TEXT,
    tokenizer: str = "bytes",
    separator: str | None = None,
    fractions: Fractions,
    processes: int | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Write the tokens of `parts` to the folder `output`; returns its manifest.

    `processes` is the number of processes that read and encode, by default one for each core that this process can use.
    ValueError, in one line: the folder holds other tokens or other files, another process writes there, nothing could
    be read, a file cannot be read or written, or the disk is full.
    """
    if (output / MANIFEST).exists():
        raise ValueError(f"{output} holds prepared tokens already: choose another output, or remove it")
    partial = output / PARTIAL
    if output.is_dir() and not partial.exists():
        others = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
        if others:
            raise ValueError(f"output={output} holds other files, such as {others[0]}: choose a new or empty folder")
    plan = plan_of(parts, columns, tokenizer, separator, fractions)
    with told_in_one_line(output), _leaving_what_goes_on(partial), locked(partial, "output"):
        _continue_plan(partial, plan)
        chosen = _choose_tokenizer(tokenizer, separator, parts, columns, fractions, partial)
        counts, malformed = _encode_parts(parts, columns, chosen, fractions, partial, processes, show_progress)
        if counts["documents"] == 0:
            for path in [*partial.glob("*.npz"), *partial.glob(TOKENIZER)]:
                path.unlink()  # there is nothing to go on with
            told = f": {malformed[0]}" if malformed else ""
            empty = f"{counts['empty']} empty ones, " if counts["empty"] else ""
            raise ValueError(
                f"the input holds no document, {empty}{counts['malformed']} malformed lines or files{told}"
            )
        manifest = _join(len(parts), chosen, fractions, partial, output, show_progress)
        manifest["counts"] |= {name: counts[name] for name in ("empty", "malformed")}
        manifest["malformed"] = malformed
        manifest["lost"] = describe_loss(_training_texts(parts, columns, fractions), chosen)
        write_text(output / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(partial)
    return manifest


def plan_of(
    parts: Sequence[Part], columns: Columns, tokenizer: str, separator: str | None, fractions: Fractions
) -> str:
    """Everything that decides the tokens of a preparation; text is identified by the sizes and times of its files."""
    return json.dumps(
        {
            "version": VERSION,
            "reading": READING,
            "parts": [[*part, [stamp(path) for path in (part.files or [part.path])]] for part in parts],
            "columns": [columns.text, columns.prompt],
            "tokenizer": [tokenizer, separator, *map(stamp, _files_of_tokenizer(tokenizer))],
            "fractions": dict(fractions),
        }
    )


def _files_of_tokenizer(tokenizer: str) -> list[str]:
    """What decides the tokens of a tokenizer: a folder, or a file and the settings beside it, which name its end."""
    if tokenizer == "bytes" or trained_size(tokenizer) is not None:
        return []
    return [tokenizer, *([] if os.path.isdir(tokenizer) else [str(Path(tokenizer).with_name(SETTINGS_FILE))])]


def _continue_plan(partial: Path, plan: str) -> None:
    path = partial / "plan.json"
    if not path.exists():
        write_text(path, plan)
    elif path.read_text(encoding="utf-8") != plan:
        raise ValueError(
            f"{partial} holds an unfinished preparation of other input or with other keys: remove it, or choose "
            "another output"
        )


def _choose_tokenizer(
    tokenizer: str, separator: str | None, parts: Sequence[Part], columns: Columns, fractions: Fractions, partial: Path
) -> Tokenizer:
    size = trained_size(tokenizer)
    if size is None:
        return read_tokenizer(tokenizer, separator)
    refuse_separator(tokenizer, separator)
    path = partial / TOKENIZER
    if not path.exists():
        trained = train_tokenizer(_training_texts(parts, columns, fractions), size)
        write_text(path, trained.to_dict()["json"])
    return read_tokenizer(str(path))


def _training_texts(parts: Sequence[Part], columns: Columns, fractions: Fractions) -> Iterator[str]:
    """Texts of the training split, from parts all over the input."""
    left = TRAINING_TEXT
    # Parts at distant places come first: 0, n/2, n/4, 3n/4, ...
    bits = max(1, (len(parts) - 1).bit_length())
    order = sorted(range(len(parts)), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    for index in order:
        for document in read_part(parts[index], columns):
            if isinstance(document, Malformed) or document.is_empty:
                continue
            if split_numbers(hashes_of([document]), fractions)[0] != SPLITS.index("train"):
                continue
            yield document.prompt + document.text
            left -= len(document.text)
            if left <= 0:
                return


def _encode_parts(
    parts: Sequence[Part],
    columns: Columns,
    tokenizer: Tokenizer,
    fractions: Fractions,
    partial: Path,
    processes: int | None,
    show_progress: bool,
) -> tuple[Counter[str], list[str]]:
    """Encode the missing parts; returns the counts of all parts, and what could not be read."""
    waiting = [index for index in range(len(parts)) if not told_path(partial, index).exists()]
    told = tokenizer.to_dict()
    processes = min(processes or usable_cores(), len(waiting))
    with progress_bar("encoding", len(parts), done=len(parts) - len(waiting), shown=show_progress) as advance:
        if processes <= 1:
            for index in waiting:
                encode_part(index, parts[index], columns, told, fractions, partial)
                advance(1)
        else:
            job = {"parts": parts, "columns": columns, "tokenizer": told, "fractions": dict(fractions)}
            for _ in encode_side_by_side(waiting, job, partial, processes):
                advance(1)
    counts: Counter[str] = Counter()
    malformed: list[Malformed] = []
    for index in range(len(parts)):
        found = json.loads(told_path(partial, index).read_text(encoding="utf-8"))
        counts.update(found["counts"])
        malformed += [Malformed(Place(*place), reason) for place, reason in found["malformed"]]
    lines = LineCounter()
    return counts, [one.describe(lines) for one in malformed[:KEPT]]


def _join(
    count: int, tokenizer: Tokenizer, fractions: Fractions, partial: Path, output: Path, show_progress: bool
) -> dict[str, Any]:
    """Write the files of all splits; returns the manifest."""
    hashes = np.concatenate([read_array(partial, index, "hashes") for index in range(count)])
    kept = first_of_equal(hashes)
    gzipped = np.concatenate([read_array(partial, index, "gzipped") for index in range(count)])[kept]
    byte_counts = np.concatenate([read_array(partial, index, "byte_counts") for index in range(count)])[kept]
    has_prompts = any(read_array(partial, index, "prompts").any() for index in range(count))
    types = file_types(tokenizer.vocab_size, prompts=has_prompts)
    writers = {split: SplitWriter(output, split, types) for split in SPLITS}
    done = 0
    with progress_bar("joining", count, shown=show_progress) as advance:
        for index in range(count):
            with np.load(encoded_path(partial, index)) as arrays:
                encoded = Encoded(**arrays)
            numbers = split_numbers(encoded.hashes, fractions)
            here = kept[done : done + len(numbers)]
            done += len(numbers)
            for number, split in enumerate(SPLITS):
                chosen = here & (numbers == number)
                prompts = {"prompts": encoded.prompts[chosen]} if has_prompts else {}
                writers[split].add(
                    encoded.tokens[np.repeat(chosen, encoded.lengths)],
                    encoded.lengths[chosen],
                    encoded.byte_counts[chosen],
                    **prompts,
                )
            advance(1)
    return {
        **manifest_of(tokenizer, output),
        "fractions": dict(fractions),
        "counts": {"documents": int(kept.sum()), "duplicates": int((~kept).sum())},
        "gzip_bits_per_byte": gzip_bits(gzipped, byte_counts),
        "splits": {split: writer.close() for split, writer in writers.items()},
    }


def manifest_of(tokenizer: Tokenizer, output: Path) -> dict[str, Any]:
    """The entries of a manifest that tell the version and the tokenizer, whose file is written to `output`."""
    told = tokenizer.to_dict()
    manifest: dict[str, Any] = {
        "version": VERSION,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "tokenizer": {key: value for key, value in told.items() if key != "json"},
    }
    if told["kind"] == "file":
        path = output / TOKENIZER
        write_text(path, told["json"])
        manifest["tokenizer_file"] = {"size": path.stat().st_size, "crc32": crc32_of(path)}
    return manifest


@contextmanager
def _leaving_what_goes_on(partial: Path) -> Iterator[None]:
    """After a mistake, remove a new folder in which nothing is encoded: the command will have other keys."""
    there = partial.exists()
    try:
        yield
    except ValueError:
        if not there and not any(partial.glob("*.npz")) and not (partial / TOKENIZER).exists():
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):
                partial.parent.rmdir()
        raise


@contextmanager
def told_in_one_line(output: Path) -> Iterator[None]:
    """Raise ValueError where a file cannot be read or written, or the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"{output}: the disk is full; make room, and the same command goes on") from error
        if error.errno == errno.ENOTDIR:
            raise ValueError(f"output={output} is or lies below a file: give a folder") from error
        raise ValueError(f"{error.filename or output}: {error.strerror or error}") from error
