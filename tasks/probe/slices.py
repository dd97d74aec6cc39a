"""The sets of a probe: slices of one generator, made once, and cached in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from longseq.arguments import is_plain
from longseq.plugins import is_foreign, source_of
from longseq.tasks.data.generators.samples import Integers, Make
from longseq.tasks.data.seeds import derive_seed
from longseq.tasks.probe.generators import (
    GENERATORS,
    IGNORED,
    Samples,
    check_options,
    check_samples,
    draw,
    generator_options,
)

# Increased when a generator makes other samples than before, so that files of earlier versions are not read.
_VERSION = 1

# Keys of a slice that are not options of its generator.
_OWN_KEYS = ("samples", "name")


class Slice(NamedTuple):
    """Sequences of one setting, and their questions.

    tokens: `[N, T]`.
    places: `[N, A]`, the positions of questions; shorter rows end in zeros.
    answers: `[N, A]`, IGNORED after the row's own questions.
    allowed: `[N, A]`, bits of the right answers if there are several; else None.
    """

    name: str
    tokens: Tensor
    places: Tensor
    answers: Tensor
    allowed: Tensor | None

    def to(self, device: torch.device) -> Slice:
        """The same slice on a device."""
        allowed = None if self.allowed is None else self.allowed.to(device)
        return Slice(self.name, self.tokens.to(device), self.places.to(device), self.answers.to(device), allowed)


Splits = dict[str, list[Slice]]


def make_splits(
    generator: str,
    options: Mapping[str, Any],
    splits: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    seed: int,
    folder: str | None = None,
) -> Splits:
    """Make the slices of each split; no sample occurs twice, within a split or across splits.

    A slice is described by `samples`, an optional `name`, and options of the generator that replace those of `options`.
    With `folder`, the result is saved there in a file, and read from it if the file has the same description.
    """
    check_slices(generator, options, splits)
    described = _describe(generator, options, splits, seed)
    if folder is None or described is None:
        return _make(generator, options, splits, seed)
    path = Path(folder) / f"{generator}_{hashlib.sha256(described.encode()).hexdigest()[:16]}.npz"
    found = _read(path, splits)
    if found is None:
        found = _make(generator, options, splits, seed)
        _write(path, found)
    return found


def _describe(
    generator: str, options: Mapping[str, Any], splits: Mapping[str, Sequence[Mapping[str, Any]]], seed: int
) -> str | None:
    """All that the samples depend on, defaults of the generator included; None if not all of it is known."""
    function, source = GENERATORS[generator], None
    if is_foreign(function) and (source := source_of(function)) is None:  # _VERSION tells of changes of ours
        return None
    chosen = generator_options(generator) | dict(options)
    if not is_plain(chosen):
        return None  # what a function or an object does, which is a default of a plug-in's, is not known
    return json.dumps([_VERSION, generator, source, chosen, _as_dicts(splits), seed], sort_keys=True)


def check_slices(generator: str, options: Mapping[str, Any], splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise ValueError, in one line, if keys or values of slices are impossible."""
    check_options(generator, options)
    for split, listed in splits.items():
        for described in listed:
            check_options(generator, {key: value for key, value in described.items() if key not in _OWN_KEYS})
            if not isinstance(described.get("samples"), int) or described["samples"] < 1:
                raise ValueError(f"data.{split}: a slice needs samples=N of at least 1, not {described.get('samples')}")


def slice_names(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each slice: its own, or the values in which it may differ from others, `512x64`."""
    names = []
    for index, described in enumerate(listed):
        values = [value for key, value in described.items() if key not in _OWN_KEYS]
        name = described.get("name") or "x".join(str(value) for value in values) or f"slice{index}"
        names.append("".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name))
    if len(set(names)) < len(names):
        names = [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]
    return names


def _make(
    generator: str, options: Mapping[str, Any], splits: Mapping[str, Sequence[Mapping[str, Any]]], seed: int
) -> Splits:
    usual = generator_options(generator) | dict(options)
    seen: Integers = np.zeros(0, dtype=np.uint64)
    made: Splits = {}
    for number, (split, listed) in enumerate(splits.items()):
        made[split] = []
        for index, (described, name) in enumerate(zip(listed, slice_names(listed), strict=True)):
            own = {key: value for key, value in described.items() if key not in _OWN_KEYS}
            random = np.random.default_rng(derive_seed(seed, number, index))
            make = partial(GENERATORS[generator], **(usual | own))
            if is_foreign(GENERATORS[generator]):
                make = partial(_make_checked, generator, make, usual["vocab_size"])
            samples, seen = draw(make, random, described["samples"], seen)
            if not (samples.labels != IGNORED).any():
                raise ValueError(f"data.generator={generator}: no sample of the slice {name} of {split} has a question")
            made[split].append(_pack(name, samples))
    return made


def _make_checked(generator: str, make: Make, vocab_size: int, random: np.random.Generator, count: int) -> Samples:
    made = make(random, count)
    try:
        check_samples(made, count, vocab_size)
    except ValueError as error:
        raise ValueError(f"data.generator={generator}: {error}") from None
    return made


def _pack(name: str, samples: Samples) -> Slice:
    labelled = samples.labels != IGNORED
    count = int(labelled.sum(axis=1).max())
    places = np.concatenate([np.argsort(~rows, axis=1, kind="stable")[:, :count] for rows in _blocks(labelled)])
    answers = np.take_along_axis(samples.labels, places, axis=1)
    allowed = None if samples.allowed is None else np.take_along_axis(samples.allowed, places, axis=1)
    places = np.where(answers == IGNORED, 0, places).astype(np.int32)
    bits = None if allowed is None else torch.from_numpy(allowed)
    return Slice(name, torch.from_numpy(samples.tokens), torch.from_numpy(places), torch.from_numpy(answers), bits)


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Blocks of rows, which bound the memory."""
    for start in range(0, len(rows), 8192):
        yield rows[start : start + 8192]


def _as_dicts(splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {split: [dict(described) for described in listed] for split, listed in splits.items()}


def _write(path: Path, splits: Splits) -> None:
    arrays = {
        f"{split}.{index}.{part}": value.numpy()
        for split, slices in splits.items()
        for index, one in enumerate(slices)
        for part, value in one._asdict().items()
        if isinstance(value, Tensor)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f"{path.stem}.{os.getpid()}.partial")
    with partial_path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(partial_path, path)


def _read(path: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> Splits | None:
    try:
        with np.load(path) as arrays:
            parts = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    except (OSError, ValueError, BadZipFile):
        return None
    return {
        split: [
            Slice(name, *(parts.get(f"{split}.{index}.{part}") for part in Slice._fields[1:]))  # type: ignore[arg-type]
            for index, name in enumerate(slice_names(listed))
        ]
        for split, listed in splits.items()
    }
