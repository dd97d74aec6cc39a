"""Batches of a probe: each is of one slice, gathered from tensors that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longseq.tasks.data.sampler import EvaluationSampler, UpdateSampler, derive_seed
from longseq.tasks.probe.slices import Slice


class ProbeTargets(NamedTuple):
    """The questions of a batch: positions `[B, A]`, answers `[B, A]`, their bits (see `Slice`), and the slice."""

    places: Tensor
    answers: Tensor
    allowed: Tensor | None
    slice_index: int


class BatchIndices(NamedTuple):
    """The rows of one slice that make a batch."""

    slice_index: int
    rows: Any


class SliceBatches(Dataset[tuple[Tensor, ProbeTargets, list[Any]]]):
    """Maps BatchIndices to a batch (tokens `[B, T]`, ProbeTargets) and the failures that loaders expect, which are
    none.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = slices

    def __getitem__(self, indices: BatchIndices) -> tuple[Tensor, ProbeTargets, list[Any]]:
        chosen = self.slices[indices.slice_index]
        rows = torch.as_tensor(indices.rows, dtype=torch.long).to(chosen.tokens.device, non_blocking=True)
        tokens, places, answers = (
            part.index_select(0, rows).long() for part in (chosen.tokens, chosen.places, chosen.answers)
        )
        allowed = None if chosen.allowed is None else chosen.allowed.index_select(0, rows)
        return tokens, ProbeTargets(places, answers, allowed, indices.slice_index), []


class MixtureSampler(UpdateSampler[BatchIndices]):
    """Yields the rows of each batch, all of one slice.

    An epoch shuffles each slice, cuts it into effective batches, and shuffles the effective batches of all slices.
    """

    repeats = 1

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        super().__init__(batch_size, seed=seed, rank=rank, world_size=world_size, accumulate=accumulate)
        effective = self.effective_batch_size
        if min(sizes) < effective:
            raise ValueError(f"a slice has {min(sizes)} training samples, and an update needs {effective}")
        self.sizes = sizes
        self.num_samples = sum(sizes)

    @property
    def updates(self) -> int:
        return sum(size // self.effective_batch_size for size in self.sizes)

    def shuffle(self) -> Callable[[int, int], BatchIndices]:
        effective = self.effective_batch_size
        random = np.random.default_rng(derive_seed(self.seed, self.epoch))
        orders = [random.permutation(size) for size in self.sizes]
        planned = [(index, batch) for index, size in enumerate(self.sizes) for batch in range(size // effective)]
        turns = random.permutation(len(planned))

        def give(update: int, part: int) -> BatchIndices:
            index, batch = planned[turns[update]]
            return BatchIndices(index, orders[index][batch * effective + part : (batch + 1) * effective : self.parts])

        return give


class SliceSampler(Sampler[BatchIndices]):
    """Yields evaluation batches: each sample of each slice once over all ranks, the same number of batches on each
    rank.
    """

    def __init__(self, sizes: Sequence[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.world_size = world_size
        self.samplers = [EvaluationSampler(size, batch_size, rank=rank, world_size=world_size) for size in sizes]

    def keep_order(self) -> None:
        """Read the samples of each slice in their order, one slice after the other, for predictions."""
        for sampler in self.samplers:
            sampler.keep_order()

    def __len__(self) -> int:
        return sum(map(len, self.samplers))

    def __iter__(self) -> Iterator[BatchIndices]:
        for index, sampler in enumerate(self.samplers):
            for rows in sampler:
                yield BatchIndices(index, rows)
