"""`longseq prepare`: text becomes a folder of tokens (see `longseq.tasks.text.store`).

Processes encode the parts of the input in parallel; one writes them in the order of the input, without duplicates.
"""

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from omegaconf import DictConfig

from longseq.files import crc32_of
from longseq.hub import find_source
from longseq.models import read
from longseq.tasks.commands import Prepare
from longseq.tasks.report import long_step, progress_bar, quiet_libraries, shorten
from longseq.tasks.text import store
from longseq.tasks.text.sources import TEXT, Columns, Document, Malformed, Part, find_parts, read_part
from longseq.tasks.text.store import SPLITS, Integers, SplitWriter, Tokens, file_type, stamp
from longseq.tasks.text.tokenizer import Tokenizer, read_tokenizer, tokenizer_from_dict, train_tokenizer, trained_size
from longseq.tasks.training.configuration import command_word, read_command
from longseq.tasks.training.system import usable_cores, write_text
from longseq.tokenizer_files import SETTINGS_FILE

T = TypeVar("T")

Fractions = Mapping[str, float]  # the shares of documents in validation and test
KEPT = 10_000  # malformed lines and files that a manifest lists

# Characters of text from which a tokenizer is trained. More take long and change the tokenizer little.
TRAINING_TEXT = 1 << 28


@quiet_libraries()
def run(cfg: DictConfig) -> None:
    """Prepare text as configured, and print a summary."""
    keys = read_command(Prepare, cfg)
    columns = Columns(keys.column, keys.prompt_column)
    inputs = [keys.input] if isinstance(keys.input, str) else keys.input
    parts = find_parts(inputs, columns, whole_files=keys.whole_files)
    fractions = {"validation": keys.validation, "test": keys.test}
    options = keys.model_dump(include={"tokenizer", "separator", "processes"})
    manifest = prepare(parts, Path(keys.output), columns=columns, fractions=fractions, **options)
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
    tokenizer: str | Mapping[str, Any] = "bytes",
    separator: str | None = None,
    fractions: Fractions,
    processes: int | None = None,
) -> dict[str, Any]:
    """Write the tokens of `parts` to the folder `output`; returns its manifest.

    `tokenizer` is as in `data.tokenizer`, or from `Tokenizer.to_dict`. `processes` read and encode, by default one for
    each core that this process can use. ValueError if the folder has tokens already or the input no document.
    """
    if (output / store.MANIFEST).exists():
        raise ValueError(f"{output} holds prepared tokens already")
    output.mkdir(parents=True, exist_ok=True)
    if not isinstance(tokenizer, str):
        chosen = tokenizer_from_dict(tokenizer)
    elif (size := trained_size(tokenizer)) is None:
        chosen = read_tokenizer(tokenizer, separator)
    else:
        with long_step("training the tokenizer"):
            chosen = train_tokenizer(_training_texts(parts, columns, fractions), size)
    others = [] if columns.prompt is None else ["prompts"]
    writers = {split: SplitWriter(output, split, chosen.vocab_size, others) for split in SPLITS}
    counts = dict.fromkeys(("documents", "duplicates", "empty", "malformed"), 0)
    listed: list[str] = []
    seen: set[bytes] = set()
    with progress_bar("encoding", len(parts)) as advance:
        for encoded, empty, malformed in encode_parts(parts, processes or usable_cores(), columns, chosen.to_dict()):
            counts["empty"] += empty
            counts["malformed"] += len(malformed)
            listed += malformed[: KEPT - len(listed)]
            fresh = np.zeros(len(encoded.hashes), bool)
            for place, content in enumerate(map(bytes, encoded.hashes)):
                fresh[place] = content not in seen
                seen.add(content)
            counts["duplicates"] += int((~fresh).sum())
            numbers = split_numbers(encoded.hashes, fractions)
            for number, split in enumerate(SPLITS):
                here = fresh & (numbers == number)
                tokens = encoded.tokens[np.repeat(here, encoded.lengths)]
                more = {name: getattr(encoded, name)[here] for name in others}
                writers[split].add(tokens, encoded.lengths[here], encoded.byte_counts[here], **more)
            advance(1)
    counts["documents"] = len(seen)
    if not seen:
        raise ValueError(f"the input holds no document: {counts}, {listed[:1]}")
    manifest = {
        **manifest_of(chosen, output),
        "fractions": dict(fractions),
        "counts": counts,
        "splits": {split: writer.close() for split, writer in writers.items()},
        "malformed": listed,
    }
    write_text(output / store.MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def plan_of(
    parts: Sequence[Part], columns: Columns, tokenizer: Any, separator: str | None, fractions: Fractions
) -> dict[str, Any]:
    """Everything that determines the tokens of a preparation; files are identified by their sizes and times."""
    files: list[str] = []
    if isinstance(tokenizer, str) and tokenizer != "bytes" and trained_size(tokenizer) is None:
        files = [tokenizer]
        if not os.path.isdir(tokenizer):  # the settings next to a tokenizer file name its end-of-text token
            files.append(str(Path(tokenizer).with_name(SETTINGS_FILE)))
    return {
        "version": store.VERSION,
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
            if isinstance(document, Malformed) or not document.text.strip():
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
        "version": store.VERSION,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "tokenizer": {key: value for key, value in described.items() if key != "json"},
    }
    if described["kind"] == "file":
        path = output / store.TOKENIZER
        write_text(path, described["json"])
        manifest["tokenizer_file"] = {"size": path.stat().st_size, "crc32": crc32_of(path)}
    return manifest


def tokenizer_of(init: str | None) -> Mapping[str, Any] | None:
    """The tokenizer of a checkpoint, folder or repository of the hub; None without one that reads text."""
    saved = None if init is None else read(find_source(init), label=f"init={init}")
    return None if saved is None else (saved.text or {}).get("tokenizer")


# --- documents as tokens: encoded, without duplicates, split by a hash of their content


class Encoded(NamedTuple):
    """Documents of a part of the input; see the store for the other fields.

    hashes: `[N, 2]` uint64, of each document's content.
    """

    tokens: Tokens
    lengths: Integers
    byte_counts: Integers
    prompts: Integers
    hashes: np.ndarray


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Encoded:
    """Encode documents; `prompt` and `text` are encoded separately. ValueError for one with the separator in it."""
    dtype = file_type("tokens", tokenizer.vocab_size)
    separator = np.array([tokenizer.separator], dtype)
    parts: list[np.ndarray] = []
    numbers: list[tuple[int, int, int]] = []
    hashes = [np.zeros((0, 2), np.uint64)]
    for batch in batched(documents):
        encoded = tokenizer.encode_all([part for one in batch for part in (one.prompt, one.text)])
        for one, prompt, text in zip(batch, encoded[::2], encoded[1::2], strict=True):
            if tokenizer.separator in prompt or tokenizer.separator in text:
                name = one.place.describe()
                raise ValueError(f"{name} holds the separator, token {tokenizer.separator}: give another separator")
            parts += [separator, prompt.astype(dtype), text.astype(dtype)]
            numbers.append((1 + len(prompt) + len(text), len(one.text.encode()), len(prompt)))
        hashes.append(hashes_of(batch))
    lengths, byte_counts, prompts = np.array(numbers, np.int64).reshape(-1, 3).T
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return Encoded(tokens, lengths, byte_counts, prompts, np.concatenate(hashes))


def hashes_of(documents: Sequence[Document]) -> np.ndarray:
    """`[N, 2]` uint64, the hashes of the contents of documents, the same on every machine."""
    digests = []
    for one in documents:
        prompt = one.prompt.encode()
        content = len(prompt).to_bytes(8, "little") + prompt + one.text.encode()
        digests.append(hashlib.blake2b(content, digest_size=16).digest())
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def split_numbers(hashes: np.ndarray, fractions: Fractions) -> np.ndarray:
    """`[N]`, the number of each document's split in SPLITS; `fractions` are the shares of validation and test.

    Other documents do not change a document's split. A larger fraction only moves documents out of training.
    """
    # A hash is a number between 0 and 1: the lowest numbers are validation, the highest numbers are test.
    place = hashes[:, 0] / 2.0**64
    numbers = np.zeros(len(hashes), np.int8)
    numbers[place < fractions["validation"]] = SPLITS.index("validation")
    numbers[place >= 1 - fractions["test"]] = SPLITS.index("test")
    return numbers


def batched(items: Iterable[T]) -> Iterator[list[T]]:
    """Lists of 256 items, and one of the rest."""
    rest = iter(items)
    while batch := list(islice(rest, 256)):
        yield batch


def encode_part(part: Part, columns: Columns, tokenizer: Mapping[str, Any]) -> tuple[Encoded, int, list[str]]:
    """The tokens of a part, the number of its empty documents, and what cannot be read."""
    empty, malformed = 0, list[str]()

    def documents() -> Iterator[Document]:
        nonlocal empty
        for one in read_part(part, columns):
            if isinstance(one, Malformed):
                malformed.append(one.describe())
            elif not one.text.strip():
                empty += 1
            else:
                yield one

    return encode(documents(), tokenizer_from_dict(tokenizer)), empty, malformed


def encode_parts(parts: Sequence[Part], processes: int, *options: Any) -> Iterator[tuple[Encoded, int, list[str]]]:
    """`encode_part` of each part, in their order; `options` are its other arguments."""
    if processes == 1 or len(parts) == 1:
        for part in parts:
            yield encode_part(part, *options)
        return
    context = multiprocessing.get_context("spawn")  # forks would share this process's threads
    with ProcessPoolExecutor(processes, context, os.putenv, ("TOKENIZERS_PARALLELISM", "false")) as pool:
        running = deque[Future[tuple[Encoded, int, list[str]]]]()
        for part in parts:
            running.append(pool.submit(encode_part, part, *options))
            if len(running) > processes:  # no more, because their tokens are in memory
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
