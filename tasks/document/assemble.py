"""The assembly of batches from the tokens and the targets of a split."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.document.batch import IGNORED, DocumentInputs
from longseq.tasks.document.sampler import Chosen
from longseq.tasks.document.truncation import crop, truncate, truncated_length
from longseq.tasks.text.store import Corpus, Integers


class Split(NamedTuple):
    """The documents of a split, and how long ones are cut.

    numbers: `[n]`, the document's number in the corpus. targets: `[n]` int64, or `[n, C]` float32 for several labels.
    """

    corpus: Corpus
    numbers: Integers
    targets: npt.NDArray[Any]
    separator: int | None
    max_length: int | None = None
    truncation: str = "none"

    @property
    def documents(self) -> int:
        return len(self.numbers)

    def checksum(self) -> int:
        """The CRC-32 of the hashes of the documents and of their targets."""
        hashes = np.ascontiguousarray(np.asarray(self.corpus.hashes)[self.numbers])
        return zlib.crc32(np.ascontiguousarray(self.targets).data, zlib.crc32(hashes.data))

    @property
    def whole_lengths(self) -> Integers:
        """`[n]`, the tokens of each document."""
        return np.diff(self.corpus.offsets)[self.numbers]

    @property
    def lengths(self) -> Integers:
        """`[n]`, the tokens of each document that are read."""
        return truncated_length(self.whole_lengths, self.max_length, self.truncation)

    @property
    def longest(self) -> int:
        """The tokens that are read of the longest document."""
        return int(self.lengths.max())

    def read(self, document: int, random: np.random.Generator | None = None) -> npt.NDArray[np.integer[Any]]:
        """The tokens of a document that are read: those that `truncation` states, or with `random` a random window."""
        number = self.numbers[document]
        tokens = np.asarray(self.corpus.tokens[self.corpus.offsets[number] : self.corpus.offsets[number + 1]])
        if random is not None and self.max_length is not None:
            return crop(tokens, self.max_length, self.separator, random)
        return truncate(tokens, self.max_length, self.truncation, self.separator)


class DocumentBatches(Dataset[tuple[DocumentInputs, Tensor, list[Any]]]):
    """Maps chosen documents to (inputs, targets, failures) as loaders expect; there are no failures.

    `budget` is the length of packed batches, `longest` that of the longest document in them. With `crops`, a seed,
    training reads another window of a document in each epoch.
    """

    def __init__(self, split: Split, budget: int, longest: int, *, crops: int | None = None) -> None:
        self.split, self.budget, self.longest, self.crops = split, budget, longest, crops
        self._whole_lengths = split.whole_lengths

    def __getitem__(self, chosen: Chosen) -> tuple[DocumentInputs, Tensor, list[Any]]:
        documents = [self.split.read(number, self._random(chosen.epoch, number)) for number in chosen.documents]
        count, places = len(documents), chosen.places
        lengths = np.zeros(places, np.int64)
        lengths[:count] = [len(one) for one in documents]
        numbers, whole = np.full(places, -1, np.int64), np.zeros(places, np.int64)
        numbers[:count] = chosen.documents
        whole[:count] = self._whole_lengths[chosen.documents]
        padding = self.split.separator or 0
        if chosen.length is None:
            tokens, cu_seqlens, mask = _pack(documents, self.budget, self.longest, places, padding)
        else:
            tokens, cu_seqlens, mask = _pad(documents, chosen.length, places, padding)
        inputs = DocumentInputs(
            tokens=tokens,
            cu_seqlens=cu_seqlens,
            mask=mask,
            max_seqlen=chosen.length or self.longest,
            lengths=torch.from_numpy(lengths),
            whole_lengths=torch.from_numpy(whole),
            numbers=torch.from_numpy(numbers),
            units=count,
            token_count=int(lengths.sum()),
        )
        known = self.split.targets
        targets = np.full((places, *known.shape[1:]), IGNORED if known.ndim == 1 else 0, known.dtype)
        targets[:count] = known[chosen.documents]
        return inputs, torch.from_numpy(targets), []

    def _random(self, epoch: int, document: int) -> np.random.Generator | None:
        return None if self.crops is None else np.random.default_rng(derive_seed(self.crops, epoch, document))


def _pack(
    documents: list[npt.NDArray[Any]], budget: int, longest: int, places: int, padding: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Documents end to end in a row of `budget` tokens, then sequences of padding; the borders of all."""
    tokens = np.full(budget, padding, np.int64)
    borders = np.full(places + 1, budget, np.int32)
    borders[0] = end = 0
    for place, one in enumerate(documents, start=1):
        tokens[end : end + len(one)] = one
        end += len(one)
        borders[place] = end
    fill = np.arange(end + longest, budget, longest)
    borders[len(documents) + 1 : len(documents) + 1 + len(fill)] = fill
    return torch.from_numpy(tokens)[None], torch.from_numpy(borders), None


def _pad(
    documents: list[npt.NDArray[Any]], length: int, places: int, padding: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Documents in a row each, with padding at their ends; the mask of their tokens."""
    tokens = np.full((places, length), padding, np.int64)
    mask = np.zeros((places, length), bool)
    for place, one in enumerate(documents):
        tokens[place, : len(one)] = one
        mask[place, : len(one)] = True
    return torch.from_numpy(tokens), None, torch.from_numpy(mask)
