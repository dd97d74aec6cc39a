"""The documents of each batch: pure functions of the seed, the epoch and the place in the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from longseq.tasks.data.sampler import BalancedDraw, UpdateSampler, derive_seed
from longseq.tasks.document.rows import Group, group, pack, row_count, slots_of
from longseq.tasks.text.store import Integers

# Seeds the order of documents in evaluation, which mixes the classes of sorted files.
_EVALUATION = 0


class Chosen(NamedTuple):
    """The documents of a batch by their numbers in the split; the batch has `places` of them.

    `length` is that of a padded batch; None for a packed one, whose length is the token budget.
    """

    documents: list[int]
    places: int
    length: int | None = None
    epoch: int = 0


class DocumentSampler(UpdateSampler[Chosen]):
    """Yields the documents of each training batch; `batch_size` is the token budget of a device.

    `lengths` are the tokens of each document of the split, after truncation. `places`, where it is not None, is that of
    all batches. ValueError for documents that are longer than the budget, or too few.
    """

    repeats = 1
    places: int | None

    def __init__(
        self,
        lengths: Integers,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        super().__init__(batch_size, seed=seed, rank=rank, world_size=world_size, accumulate=accumulate)
        self.lengths = lengths
        self.num_samples = len(lengths)
        self.tokens_per_epoch = int(lengths.sum())  # that an epoch reads
        self.longest = int(lengths.max())
        if self.longest > batch_size:
            raise ValueError(
                f"the longest training document has {self.longest} tokens, and a batch holds {batch_size}: give a "
                "larger recipe.batch_size, or data.max_length"
            )


class PackedSampler(DocumentSampler):
    """Yields documents that fill rows (see `longseq.tasks.document.rows`).

    An effective batch is cut into rows of equal length, whose number depends on its size and on the documents' lengths
    alone; the devices and the accumulated batches share the rows out. Each epoch packs all documents anew, in its own
    order. Rows that do not fill an effective batch are left out: those with the last documents of the order. With
    `classes [N]` an epoch draws as many documents, each class equally often (see
    `longseq.tasks.data.sampler.BalancedSampler`).
    """

    def __init__(
        self, lengths: Integers, batch_size: int, *, classes: npt.NDArray[np.int64] | None = None, **place: int
    ) -> None:
        super().__init__(lengths, batch_size, **place)  # type: ignore[arg-type]
        self._balanced = None if classes is None else BalancedDraw(classes)
        effective = self.effective_batch_size
        self.rows = row_count(lengths, effective)
        if self.rows % self.parts:
            raise ValueError(f"{self.rows} rows of documents cannot be shared evenly by {self.parts} parts of a batch")
        self.row = effective // self.rows
        self.slots = slots_of(lengths, self.row)
        # The sequences of padding that fill a batch up are no longer than the longest document.
        self.places = self.slots * self.rows // self.parts + -(-batch_size // self.longest)
        packed = self._pack(0)
        self._updates = len(packed) // self.rows
        # The tokens of an epoch, about: those of its whole effective batches.
        read = [number for row in packed[: self._updates * self.rows] for number in row]
        self.tokens_per_epoch = int(lengths[read].sum())
        if self._updates == 0:
            raise ValueError(f"the training split has {int(lengths.sum())} tokens, and an update needs {effective}")

    @property
    def updates(self) -> int:
        return self._updates

    def shuffle(self) -> Callable[[int, int], Chosen]:
        epoch, again = self.epoch, 0
        rows = self._pack(epoch)
        while len(rows) < self.updates * self.rows:  # an epoch that packs better begins a second pass at its end
            again += 1
            rows += self._pack(epoch, again)

        def give(update: int, part: int) -> Chosen:
            own = rows[update * self.rows + part : (update + 1) * self.rows : self.parts]
            numbers = [number for row in own for number in row]
            return Chosen(numbers, self.places, epoch=epoch)  # type: ignore[arg-type]

        return give

    def _pack(self, *draw: int) -> list[list[int]]:
        generator = np.random.default_rng(derive_seed(self.seed, *draw))
        if self._balanced is None:
            order = generator.permutation(self.num_samples).tolist()
        else:
            order, _ = self._balanced.draw(self.num_samples, generator)
        return list(pack(self.lengths, order, self.row, self.slots))


class PaddedSampler(DocumentSampler):
    """Yields documents of similar lengths, in groups that `longseq.tasks.document.rows.group` makes.

    An epoch reads each document once. It shuffles the documents of each group, and then the batches of all groups. A
    batch holds up to `recipe.batch_size` tokens with its padding; the devices and the accumulated batches take every
    n-th document of it.
    """

    places = None

    def __init__(self, lengths: Integers, batch_size: int, **place: int) -> None:
        super().__init__(lengths, batch_size, **place)  # type: ignore[arg-type]
        self._order = np.argsort(-lengths, kind="stable")
        self.groups = group(lengths[self._order], self.effective_batch_size)

    @property
    def updates(self) -> int:
        return sum(one.batches for one in self.groups)

    def shuffle(self) -> Callable[[int, int], Chosen]:
        epoch = self.epoch
        random = np.random.default_rng(derive_seed(self.seed, epoch))
        batches: list[tuple[Group, Any]] = []
        for one in self.groups:
            order = random.permutation(self._order[one.start : one.stop])
            batches += [(one, order[at : at + one.rows]) for at in range(0, len(order), one.rows)]
        turns = random.permutation(len(batches))

        def give(update: int, part: int) -> Chosen:
            one, numbers = batches[turns[update]]
            return Chosen(numbers[part :: self.parts].tolist(), -(-one.rows // self.parts), one.length, epoch)

        return give


def neighbours(lengths: Integers, budget: int, slots: int | None) -> Iterator[list[int]]:
    """Rows of neighbouring documents, in their order: as many as `budget` tokens hold.

    A packed row has at most `slots` documents. With None the documents are padded to the longest of their row.
    """
    row: list[int] = []
    tokens = longest = 0
    for number, length in enumerate(lengths.tolist()):
        tokens, longest = tokens + length, max(longest, length)
        full = longest * (len(row) + 1) > budget if slots is None else tokens > budget or len(row) == slots
        if row and full:
            yield row
            row, tokens, longest = [], length, length
        row.append(number)
    if row:
        yield row


class EveryDocument(Sampler[Chosen]):
    """Yields batches for evaluation: each document once over all ranks, and as many batches on each rank.

    A batch holds up to `budget` tokens. Where the batches do not divide over the ranks, some ranks have one without
    documents. ValueError for a document that is longer than the budget. After `keep_order` the documents are in the
    order of the split: rank r of n has every n-th batch, from batch r on.
    """

    def __init__(self, lengths: Integers, budget: int, *, packed: bool, rank: int = 0, world_size: int = 1) -> None:
        self.budget, self.rank, self.world_size = budget, rank, world_size
        self._lengths, self._packed = lengths, packed
        self.longest = int(lengths.max())
        if self.longest > budget:
            raise ValueError(f"the longest document to evaluate has {self.longest} tokens, and a batch holds {budget}")
        if packed:
            slots, places = self._places()
            order = np.random.default_rng(_EVALUATION).permutation(len(lengths)).tolist()
            self._batches = [Chosen(row, places) for row in pack(lengths, order, budget, slots)]
        else:
            order = np.argsort(-lengths, kind="stable")
            self._batches = [
                Chosen(order[at : min(at + one.rows, one.stop)].tolist(), one.rows, one.length)
                for one in group(lengths[order], budget)
                for at in range(one.start, one.stop, one.rows)
            ]

    def keep_order(self) -> None:
        """Read the documents in the order of the split, for predictions, which nothing else pairs with documents.

        Batches are neighbours then, with more padding than those of similar lengths.
        """
        rows = neighbours(self._lengths, self.budget, self._places()[0] if self._packed else None)
        if self._packed:
            self._batches = [Chosen(row, self._places()[1]) for row in rows]
        else:
            self._batches = [Chosen(row, len(row), int(self._lengths[row].max())) for row in rows]

    def _places(self) -> tuple[int, int]:
        """The most documents of a packed batch, and its places, which the sequences of padding need too."""
        slots = slots_of(self._lengths, self.budget)
        return slots, slots + -(-self.budget // self.longest)

    def __len__(self) -> int:
        return -(-len(self._batches) // self.world_size)

    def __iter__(self) -> Iterator[Chosen]:
        for first in range(0, len(self._batches), self.world_size):
            at = first + self.rank
            yield self._batches[at] if at < len(self._batches) else self._batches[first]._replace(documents=[])
