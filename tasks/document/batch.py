"""Batches of documents: which documents make a batch, and their tokens, borders and classes.

A loader yields `(DocumentInputs, targets)`. All documents of a batch lie end to end in one row:

    inputs, targets = batch
    logits = model(inputs.tokens, cu_seqlens=inputs.packing)          # [N, classes]
    loss = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

A batch may have more places (N) than documents, so that all batches have one shape and all processes have as
many batches. An empty place has the document number -1 and the target IGNORED, or zeros for labels.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longseq.kernels.packing import Packing
from longseq.tasks.data.loader import Batch
from longseq.tasks.data.sampler import EpochOrder, UpdateSampler, derive_seed
from longseq.tasks.text.store import Corpus, Integers
from longseq.tasks.text.windows import IGNORED as IGNORED

Tokens = npt.NDArray[np.integer[Any]]

_POOL = 256  # the next documents of the order, from which `pack` fills a row
_SAMPLE = 10000  # the documents by which `row_count` chooses the length of rows


class DocumentInputs(NamedTuple):
    """The documents of a batch with N places. Lightning moves the tensors to the device; numbers stay on the host.

    tokens: `[1, L]` int64, with the token budget L.
    cu_seqlens: `[N + 1]` int32, the borders of N sequences in the row, documents first. Sequences of padding, which
        are empty places, fill the row up to L.
    max_seqlen: an upper bound of the sequences' lengths, the same for all batches of a loader.
    lengths, whole_lengths: `[N]` int64, tokens of each document after and before truncation; 0 in empty places.
    numbers: `[N]` int64, the number of each document in its split; -1 in empty places.
    units: documents in this batch on this process; may be 0 in a distributed evaluation.
    token_count: the sum of `lengths`.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    lengths: Tensor
    whole_lengths: Tensor
    numbers: Tensor
    units: int
    token_count: int

    @property
    def packing(self) -> Packing:
        """The borders of the documents, for a model."""
        return Packing(self.cu_seqlens, self.tokens.shape[1], max_seqlen=self.max_seqlen)


# The inputs and the targets: `[N]` int64 class numbers, or for several labels `[N, C]` float32 of 0 and 1.
DocumentBatch = tuple[DocumentInputs, Tensor]


def truncate(
    tokens: Tokens,
    max_length: int | None,
    truncation: str,
    separator: int | None,
    random: np.random.Generator | None = None,
) -> Tokens:
    """At most `max_length` tokens of a document; with `random` a random window of so many.

    `head_tail` takes half from each end (the odd token from the head). A leading `separator` is always kept.
    """
    if max_length is None or len(tokens) <= max_length or (truncation == "none" and random is None):
        return tokens
    begin = int(separator is not None and tokens[0] == separator)
    first, text, room = tokens[:begin], tokens[begin:], max_length - begin
    spare = len(text) - room
    if random is not None or truncation == "middle":
        start = spare // 2 if random is None else int(random.integers(spare + 1))
        return np.concatenate([first, text[start : start + room]])
    head = {"head": room, "tail": 0, "head_tail": -(-room // 2)}[truncation]
    return np.concatenate([first, text[:head], text[head + spare :]])


class Split(NamedTuple):
    """The documents of a split, and how long ones are truncated.

    numbers: `[n]`, the documents' numbers in the corpus. targets: `[n]` int64, or `[n, C]` float32 for several labels.
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
        """The CRC-32 of the documents' hashes and targets."""
        hashes = np.ascontiguousarray(np.asarray(self.corpus.hashes)[self.numbers])
        return zlib.crc32(np.ascontiguousarray(self.targets).data, zlib.crc32(hashes.data))

    @property
    def whole_lengths(self) -> Integers:
        """`[n]`, the tokens of each document before truncation."""
        return np.diff(self.corpus.offsets)[self.numbers]

    @property
    def lengths(self) -> Integers:
        """`[n]`, the tokens of each document after truncation."""
        lengths = self.whole_lengths
        return lengths if self.truncation == "none" else np.minimum(lengths, self.max_length)  # type: ignore[arg-type]

    @property
    def longest(self) -> int:
        """The tokens of the longest document after truncation."""
        return int(self.lengths.max())

    def read(self, document: int, crop_seed: int | None = None) -> Tokens:
        """The tokens of a document after truncation, or with a seed a random window of them."""
        number = self.numbers[document]
        tokens = np.asarray(self.corpus.tokens[self.corpus.offsets[number] : self.corpus.offsets[number + 1]])
        random = None if crop_seed is None else np.random.default_rng(crop_seed)
        return truncate(tokens, self.max_length, self.truncation, self.separator, random)


class Chosen(NamedTuple):
    """The documents of a batch by their numbers in the split."""

    documents: list[int]
    places: int
    epoch: int = 0


class DocumentBatches(Dataset[Batch]):
    """Maps `Chosen` to inputs and targets.

    `budget` is the length of rows, `longest` of the longest document. With the seed `crops`, each epoch reads
    another window of a long document.
    """

    def __init__(self, split: Split, budget: int, longest: int, *, crops: int | None = None) -> None:
        self.split, self.budget, self.longest, self.crops = split, budget, longest, crops
        self._whole_lengths = split.whole_lengths

    def __getitem__(self, chosen: Chosen) -> Batch:
        documents = []
        for number in chosen.documents:
            crop_seed = None if self.crops is None else derive_seed(self.crops, chosen.epoch, number)
            documents.append(self.split.read(number, crop_seed))
        count, empty = len(documents), chosen.places - len(documents)
        lengths = [len(one) for one in documents]
        # The documents lie end to end, then sequences of padding.
        tokens = np.full((1, self.budget), self.split.separator or 0, np.int64)
        ends = np.cumsum([0, *lengths])
        tokens[0, : ends[-1]] = np.concatenate([*documents, np.zeros(0, np.int64)])
        fill = np.arange(ends[-1] + self.longest, self.budget, self.longest)
        borders = np.full(chosen.places + 1, self.budget, np.int32)
        borders[: len(ends) + len(fill)] = [*ends, *fill]
        inputs = DocumentInputs(
            tokens=torch.from_numpy(tokens),
            cu_seqlens=torch.from_numpy(borders),
            max_seqlen=self.longest,
            lengths=torch.tensor([*lengths, *[0] * empty]),
            whole_lengths=torch.tensor([*self._whole_lengths[chosen.documents].tolist(), *[0] * empty]),
            numbers=torch.tensor([*chosen.documents, *[-1] * empty]),
            units=count,
            token_count=sum(lengths),
        )
        known = self.split.targets
        targets = np.full((chosen.places, *known.shape[1:]), IGNORED if known.ndim == 1 else 0, known.dtype)
        targets[:count] = known[chosen.documents]
        return Batch(inputs, torch.from_numpy(targets), [])


class PackedSampler(UpdateSampler[Chosen]):
    """Yields documents that fill rows (see `pack`); `batch_size` is the token budget of a device.

    `lengths` are the tokens of each document after truncation. An effective batch consists of rows of equal length,
    which devices and accumulated batches share; their number depends only on its size and the documents' lengths. Each
    epoch packs all documents anew, in its own order, and leaves out the last rows if they do not fill an effective
    batch. With `classes [N]` an epoch draws as many documents, each class equally often (see `EpochOrder`). ValueError
    for a document longer than the budget, fewer tokens than an update needs, and rows that do not divide evenly.
    """

    def __init__(self, lengths: Integers, batch_size: int, *, classes: Integers | None = None, **options: int) -> None:
        super().__init__(batch_size, **options)  # type: ignore[arg-type]
        self.lengths = lengths
        self.num_samples = len(lengths)
        self.longest = int(lengths.max())
        if self.longest > batch_size:
            raise ValueError(f"the longest training document has {self.longest} tokens, and a batch holds {batch_size}")
        self._order = EpochOrder(self.num_samples, classes)
        effective = self.effective_batch_size
        self.rows = row_count(lengths, effective)
        if self.rows % self.parts:
            raise ValueError(f"{self.rows} rows of documents cannot be shared evenly by {self.parts} parts of a batch")
        self.row = effective // self.rows
        self.slots = slots_of(lengths, self.row)
        # Sequences of padding are no longer than the longest document.
        self.places = self.slots * self.rows // self.parts + -(-batch_size // self.longest)
        packed = self._pack(0)
        self._updates = len(packed) // self.rows
        # Other epochs may read slightly more or fewer tokens than the first.
        self.tokens_per_epoch = sum(int(lengths[row].sum()) for row in packed[: self._updates * self.rows])
        if self._updates == 0:
            raise ValueError(f"the training split has {int(lengths.sum())} tokens, and an update needs {effective}")

    @property
    def updates(self) -> int:
        return self._updates

    def shuffle(self) -> Callable[[int, int], Chosen]:
        epoch, again = self.epoch, 0
        rows = self._pack(epoch)
        while len(rows) < self.updates * self.rows:  # packed better than the first epoch: begin a second pass
            again += 1
            rows += self._pack(epoch, again)

        def give(update: int, part: int) -> Chosen:
            own = rows[update * self.rows + part : (update + 1) * self.rows : self.parts]
            return Chosen([number for row in own for number in row], self.places, epoch)

        return give

    def _pack(self, *draw: int) -> list[list[int]]:
        generator = np.random.default_rng(derive_seed(self.seed, *draw))
        order, _ = self._order.draw(self.num_samples, generator)
        return list(pack(self.lengths, order, self.row, self.slots))


class EveryDocument(Sampler[Chosen]):
    """Yields batches of up to `budget` tokens: each document once over all ranks, and as many batches on each rank.

    Some ranks may end with a batch without documents. ValueError for a document longer than the budget.
    """

    def __init__(self, lengths: Integers, budget: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.budget, self.rank, self.world_size = budget, rank, world_size
        self._lengths = lengths
        self.longest = int(lengths.max())
        if self.longest > budget:
            raise ValueError(f"the longest document to evaluate has {self.longest} tokens, and a batch holds {budget}")
        self._slots = slots_of(lengths, budget)
        self._places = self._slots + -(-budget // self.longest)  # with sequences of padding
        # A fixed random order mixes the classes of sorted files.
        order = np.random.default_rng(0).permutation(len(lengths)).tolist()
        self._batches = [Chosen(row, self._places) for row in pack(lengths, order, budget, self._slots)]

    def keep_order(self) -> None:
        """Read the documents in the order of the split, for predictions: rank r of n has every n-th batch from r on."""
        rows: list[list[int]] = [[]]
        free = self.budget
        for number, length in enumerate(self._lengths.tolist()):
            if length > free or len(rows[-1]) == self._slots:
                rows.append([])
                free = self.budget
            rows[-1].append(number)
            free -= length
        self._batches = [Chosen(row, self._places) for row in rows]

    def __len__(self) -> int:
        return -(-len(self._batches) // self.world_size)

    def __iter__(self) -> Iterator[Chosen]:
        for first in range(0, len(self._batches), self.world_size):
            at = first + self.rank
            yield self._batches[at] if at < len(self._batches) else self._batches[first]._replace(documents=[])


def row_count(lengths: Integers, budget: int, most: int = 1024) -> int:
    """The number of rows of equal length into which an effective batch of `budget` tokens is cut.

    It is the largest divisor of the budget, at most `most`, whose rows hold the longest document and are filled to
    95 %; without such a divisor, the one with the fullest rows.
    """
    longest = int(lengths.max())
    sample = lengths if len(lengths) <= _SAMPLE else np.random.default_rng(0).choice(lengths, _SAMPLE, replace=False)
    best, fullest = 0, 0.0
    for count in range(min(most, budget // longest), 0, -1):
        if budget % count:
            continue
        row = budget // count
        rows = list(pack(sample, range(len(sample)), row, slots_of(sample, row)))
        full = rows[:-1] or rows  # the last row holds the rest
        share = float(sum(sample[one].sum() for one in full)) / (len(full) * row)
        if share > fullest:
            best, fullest = count, share
        if share >= 0.95:
            break
    return best


def slots_of(lengths: Integers, row: int) -> int:
    """The most documents of a row: half as many more than fit on average, and two."""
    return int(1.5 * row / float(lengths.mean())) + 2


def pack(lengths: Integers, order: Iterable[int], row: int, slots: int) -> Iterator[list[int]]:
    """Rows of at most `row` tokens and `slots` documents, which hold each document of `order` once.

    A row takes the next documents of the order. If one does not fit, the longest of the following 256 that fits takes
    its place, of equal ones the last. No document is longer than a row.
    """
    waiting, sizes = iter(order), lengths.tolist()
    pool: list[int] = []
    while pool := [*pool, *islice(waiting, _POOL - len(pool))]:
        free, taken = row, list[int]()
        while pool and len(taken) < slots:
            at = 0
            if sizes[pool[0]] > free:
                fitting = [(sizes[one], place) for place, one in enumerate(pool) if sizes[one] <= free]
                if not fitting:
                    break
                at = max(fitting)[1]
            taken.append(pool.pop(at))
            free -= sizes[taken[-1]]
        yield taken
