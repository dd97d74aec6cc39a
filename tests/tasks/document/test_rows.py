"""Batches by token budget: little padding, each document once, the same documents on any number of processes."""

from __future__ import annotations

import numpy as np
import pytest

from longseq.tasks.document.batch import Chosen, EveryDocument, PackedSampler


def draw_lengths(median: int, count: int, spread: float = 0.8, seed: int = 0) -> np.ndarray:
    lengths = np.exp(np.log(median) + spread * np.random.default_rng(seed).standard_normal(count))
    return np.maximum(20, lengths).astype(np.int64)


def batches(sampler: PackedSampler, epoch: int = 0) -> list[Chosen]:
    sampler.set_epoch(epoch)
    return list(sampler)


def together(lengths: np.ndarray, effective: int, parts: int) -> list[list[int]]:
    """The documents of each effective batch, which `parts` processes share."""
    samplers = [
        PackedSampler(lengths, effective // parts, seed=3, rank=rank, world_size=parts) for rank in range(parts)
    ]
    found = [batches(sampler) for sampler in samplers]
    return [sorted(number for one in update for number in one.documents) for update in zip(*found, strict=True)]


@pytest.mark.parametrize(("median", "count", "most"), [(11000, 1500, None), (1000, 5000, 4096)])
def test_at_least_95_percent_of_the_tokens_are_real(median: int, count: int, most: int | None) -> None:
    lengths = np.minimum(draw_lengths(median, count), most or 10**9)
    found = batches(PackedSampler(lengths, 1 << 18, seed=0))
    assert sum(lengths[one.documents].sum() for one in found) >= 0.95 * (1 << 18) * len(found)
    for one in found:
        assert lengths[one.documents].sum() <= 1 << 18
        assert len(one.documents) < one.places


def test_effective_batches_do_not_depend_on_the_processes() -> None:
    lengths = np.minimum(draw_lengths(1000, 800), 4096)
    alone = together(lengths, 1 << 16, 1)
    assert together(lengths, 1 << 16, 2) == alone
    assert together(lengths, 1 << 16, 4) == alone
    one = PackedSampler(lengths, 1 << 15, seed=3, accumulate=2)
    found = batches(one)
    assert [sorted(a.documents + b.documents) for a, b in zip(found[::2], found[1::2], strict=True)] == alone


def test_an_epoch_is_a_function_of_the_seed_and_its_number() -> None:
    lengths = np.minimum(draw_lengths(1000, 800), 4096)
    sampler = PackedSampler(lengths, 1 << 14, seed=3)
    first, again = batches(sampler), batches(PackedSampler(lengths, 1 << 14, seed=3))
    assert first == again
    other, reseeded = batches(sampler, 1), batches(PackedSampler(lengths, 1 << 14, seed=4))
    assert len(other) == len(first) == len(sampler)
    assert other != first
    assert reseeded != first
    read = [number for one in first for number in one.documents]
    assert len(read) == len(set(read))
    assert len(read) > 780  # only rows that fill no effective batch are left out


def test_evaluation_reads_each_document_once_on_any_number_of_processes() -> None:
    lengths = draw_lengths(300, 101)
    for ranks in (1, 2, 3):
        found = [list(EveryDocument(lengths, 8192, rank=rank, world_size=ranks)) for rank in range(ranks)]
        assert len({len(one) for one in found}) == 1
        read = [number for one in found for batch in one for number in batch.documents]
        assert sorted(read) == list(range(101))
