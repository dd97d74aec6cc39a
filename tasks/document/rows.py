"""Which documents stand together: rows for packed batches, groups of similar lengths for padded ones.

Pure functions of lengths and an order, without random numbers of their own.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longseq.tasks.text.store import Integers

# Documents from which a row takes those that fill it, beside those that are next in the order.
_POOL = 256

# Documents by which the length of rows is chosen.
_SAMPLE = 10000

# The share of real tokens below which padded batches of a block (see `group`) are drawn from fewer documents.
_REAL = 0.96


def row_count(lengths: Integers, budget: int, most: int = 1024) -> int:
    """The number of rows of equal length into which an effective batch of `budget` tokens is cut; 0 if none fits.

    It is the largest divisor of the budget, at most `most`, whose rows hold the longest document and are filled to
    95 %; without one, that with the fullest rows. So it depends on neither the number of devices nor that of
    accumulated batches, which share the rows out.
    """
    longest = int(lengths.max())
    counts = [count for count in range(min(most, budget // longest), 0, -1) if budget % count == 0]
    sample = lengths if len(lengths) <= _SAMPLE else np.random.default_rng(0).choice(lengths, _SAMPLE, replace=False)
    best, fullest = 0, 0.0
    for count in counts:
        row = budget // count
        rows = list(pack(sample, range(len(sample)), row, slots_of(sample, row)))
        share = real_share(sample, rows[:-1] or rows, row)  # the last row holds what is left
        if share > fullest:
            best, fullest = count, share
        if share >= 0.95:
            break
    return best


def slots_of(lengths: Integers, row: int) -> int:
    """The most documents of a row: half as many more than a row of average documents has, and a few."""
    return int(1.5 * row / float(lengths.mean())) + 2


def pack(lengths: Integers, order: Sequence[int], row: int, slots: int) -> Iterator[list[int]]:
    """Rows of at most `row` tokens and `slots` documents, which hold each document of `order` once.

    A row begins with the first documents of the order that have not been read. Where the next one does not fit, the
    longest that fits among the following 256 takes its place. No document is longer than a row.
    """
    waiting = deque(order)
    pool: list[tuple[int, int, int]] = []  # sorted: (length, place in the order, document)
    arrivals: deque[tuple[int, int, int]] = deque()  # the same, in the order; some have left the pool already
    place, gone = 0, set[int]()
    while True:
        while waiting and len(pool) < _POOL:
            document = waiting.popleft()
            entry = (int(lengths[document]), place, document)
            insort(pool, entry)
            arrivals.append(entry)
            place += 1
        if not pool:
            return
        free, taken = row, list[int]()
        while pool and len(taken) < slots:
            while arrivals[0][1] in gone:
                gone.remove(arrivals.popleft()[1])
            entry = arrivals[0]
            if entry[0] > free:
                at = bisect_right(pool, (free, place, 0)) - 1
                if at < 0:
                    break
                entry = pool[at]
            pool.remove(entry)
            gone.add(entry[1])
            free -= entry[0]
            taken.append(entry[2])
        while arrivals and arrivals[0][1] in gone:
            gone.remove(arrivals.popleft()[1])
        yield taken


class Group(NamedTuple):
    """Batches of documents of similar lengths: `batches` of `rows` documents each, padded to `length` tokens.

    The documents are `order[start:stop]` of the order from long to short; the last batch may have fewer than `rows`.
    """

    start: int
    stop: int
    rows: int
    length: int

    @property
    def batches(self) -> int:
        return -(-(self.stop - self.start) // self.rows)


def group(lengths: Integers, budget: int) -> list[Group]:
    """Groups of documents, sorted from long to short, for padded batches of at most `budget` tokens.

    The documents of a group are shuffled before they become batches. A group has as many batches, of 8, 4, 2 and 1, as
    keep padding small: at most 4 % of the tokens. Where one batch has more padding it becomes smaller, down to 8
    documents. Numbers above 8 of documents in a batch are multiples of 8, so that devices share them out evenly.
    """
    found: list[Group] = []
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        most = min(_even(budget // longest), len(lengths) - start)
        for batches, rows in _choices(most):
            stop = min(start + batches * rows, len(lengths))
            if lengths[start:stop].sum() >= _REAL * -(-(stop - start) // rows) * rows * longest:
                break
        found.append(Group(start, stop, rows, longest))
        start = stop
    return found


def _even(rows: int) -> int:
    return rows - rows % 8 if rows > 8 else rows


def _choices(most: int) -> Iterator[tuple[int, int]]:
    """Numbers of batches, and of documents in each."""
    yield from ((batches, most) for batches in (8, 4, 2, 1))
    while (most := _even(most // 2)) >= 8:
        yield 1, most


def real_share(lengths: Integers, rows: Sequence[Sequence[int]], row: int) -> float:
    """The share of the tokens of rows that documents fill."""
    return float(sum(lengths[one].sum() for one in map(np.asarray, rows))) / (len(rows) * row)
