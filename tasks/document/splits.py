"""The division of documents into training, validation and test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from longseq.tasks.data.labels import Labels
from longseq.tasks.text.store import SPLITS, Integers

Hashes = npt.NDArray[np.uint64]


def divide(
    labels: Integers, sets: Sequence[Labels], hashes: Hashes, fractions: Mapping[str, float], *, multi_label: bool
) -> dict[str, Integers]:
    """The numbers of the documents of each split of SPLITS, stratified by label.

    Of the documents of a label the share `fractions["validation"]` goes to validation, `fractions["test"]` to test, and
    at least one to each where there are enough. Hashes of the contents select them, so that a split depends on neither
    the order of a file nor a seed, and equal documents go to the same split. A document of several labels counts as one
    of its rarest label.

    ValueError if a class has one document only: a split needs one to train on and one to measure.
    """
    strata = _rarest(labels, sets)
    same = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    first, group = same[1], same[2].reshape(-1)  # the first of equal documents, and the number of each one's group
    split = np.zeros(len(first), np.int8)
    for stratum in np.unique(strata[first]).tolist():
        members = np.flatnonzero(strata[first] == stratum)  # in the order of the hashes, which `unique` sorts
        if len(members) == 1 and not multi_label and fractions:
            raise ValueError(f"the class {sets[labels[first[members[0]]]][0]!r} has one document, too few for a split")
        room, start = len(members) - 1, 0
        for name in ("test", "validation"):
            if name in fractions and room:
                count = min(room, max(1, round(fractions[name] * len(members))))
                split[members[start : start + count]] = SPLITS.index(name)
                start, room = start + count, room - count
    return {name: np.flatnonzero(split[group] == index) for index, name in enumerate(SPLITS)}


def _rarest(labels: Integers, sets: Sequence[Labels]) -> Integers:
    """`[N]`, the number of the rarest label of each document; that of documents without one is -1."""
    counts: Counter[str] = Counter()
    for number, count in zip(*np.unique(labels, return_counts=True), strict=True):
        counts.update(dict.fromkeys(sets[number], int(count)))
    order = {name: index for index, (name, _) in enumerate(counts.most_common())}
    return np.array([max((order[name] for name in one), default=-1) for one in sets], np.int64)[labels]


def find_repeats(hashes: Mapping[str, Hashes]) -> dict[str, Integers]:
    """The numbers of the documents of training that validation or test have too, and of validation that test has."""
    keys = {split: _joined(found) for split, found in hashes.items()}
    repeats = {}
    for number, split in enumerate(SPLITS):
        held = [keys[name] for name in SPLITS[number + 1 :] if name in keys]
        if split in keys and held:
            repeats[split] = np.flatnonzero(np.isin(keys[split], np.concatenate(held)))
    return {split: numbers for split, numbers in repeats.items() if len(numbers)}


def _joined(hashes: Hashes) -> npt.NDArray[np.void]:
    """`[N]`, both numbers of a hash as one value."""
    return np.ascontiguousarray(hashes).view([("a", "<u8"), ("b", "<u8")]).reshape(-1)
