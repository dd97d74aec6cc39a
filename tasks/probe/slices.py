"""The sets of a probe: slices of one generator, made once, and cached in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longseq.tasks.data.generators import Integers
from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.probe.generators import GENERATORS, IGNORED, Samples, draw, generator_options, is_own

# Increased when a generator makes other samples than before, so that older files are not read.
_VERSION = 1

# Keys of a slice that are not options of its generator.
_OWN_KEYS = ("samples", "name")

Described = Mapping[str, Sequence[Mapping[str, Any]]]


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
    generator: str, options: Mapping[str, Any], splits: Described, *, seed: int, folder: str | None = None
) -> Splits:
    """Make the slices of each split; no sample occurs twice, within a split or across splits.

    A slice is described by `samples`, an optional `name`, and options of the generator that replace those of `options`.
    With `folder`, the result is saved there in a file, and read from it if the file has the same description. Samples
    of a plug-in's generator are not saved, since its source may change.
    """
    options = generator_options(generator) | dict(options)
    if folder is None or not is_own(generator):
        return _make(generator, options, splits, seed)
    described = {split: [dict(one) for one in listed] for split, listed in splits.items()}
    content = json.dumps([_VERSION, generator, options, described, seed], sort_keys=True)
    path = Path(folder) / f"{generator}_{hashlib.sha256(content.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        _write(path, _make(generator, options, splits, seed))
    return _read(path, splits)


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


def _make(generator: str, options: dict[str, Any], splits: Described, seed: int) -> Splits:
    seen: Integers = np.zeros(0, dtype=np.uint64)
    made: Splits = {}
    for number, (split, listed) in enumerate(splits.items()):
        made[split] = []
        for index, (described, name) in enumerate(zip(listed, slice_names(listed), strict=True)):
            own = {key: value for key, value in described.items() if key not in _OWN_KEYS}
            random = np.random.default_rng(derive_seed(seed, number, index))
            samples, seen = draw(partial(GENERATORS[generator], **(options | own)), random, described["samples"], seen)
            made[split].append(_pack(name, samples))
    return made


def _pack(name: str, samples: Samples) -> Slice:
    labelled = samples.labels != IGNORED
    count = int(labelled.sum(axis=1).max())
    # In blocks of rows, which bound the memory.
    blocks = [labelled[start : start + 8192] for start in range(0, len(labelled), 8192)]
    places = np.concatenate([np.argsort(~rows, axis=1, kind="stable")[:, :count] for rows in blocks])
    answers = np.take_along_axis(samples.labels, places, axis=1)
    allowed = None if samples.allowed is None else torch.from_numpy(np.take_along_axis(samples.allowed, places, axis=1))
    places = np.where(answers == IGNORED, 0, places).astype(np.int32)
    return Slice(name, torch.from_numpy(samples.tokens), torch.from_numpy(places), torch.from_numpy(answers), allowed)


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


def _read(path: Path, splits: Described) -> Splits:
    with np.load(path) as arrays:
        parts = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    return {
        split: [
            Slice(name, *(parts.get(f"{split}.{index}.{part}") for part in Slice._fields[1:]))  # type: ignore[arg-type]
            for index, name in enumerate(slice_names(listed))
        ]
        for split, listed in splits.items()
    }
