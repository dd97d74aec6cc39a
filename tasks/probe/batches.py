"""Batches of a probe: whole batches of one slice each, picked from tensors that stay on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longseq.tasks.data.sampler import EvaluationSampler
from longseq.tasks.data.seeds import derive_seed
from longseq.tasks.probe.slices import Slice


class ProbeTargets(NamedTuple):
    """What is asked in a batch: the places `[B, A]`, the answers `[B, A]` and their bits (see `Slice`), the slice."""

    places: Tensor
    answers: Tensor
    allowed: Tensor | None
    slice_index: int


class BatchIndices(NamedTuple):
    """The rows of one slice that make a batch."""

    slice_index: int
    rows: Any


class SliceBatches(Dataset[tuple[Tensor, ProbeTargets, list[Any]]]):
    """Maps BatchIndices to a batch (tokens `[B, T]`, ProbeTargets) and the failures that loaders expect: none."""

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


class MixtureSampler(Sampler[BatchIndices]):
    """Yields the batches of one rank, from batch `start` of epoch `epoch` on.

    An epoch shuffles each slice, cuts it into batches over all ranks, and shuffles the batches of all slices. What does
    not fill a batch is dropped. Everything is a function of (seed, epoch).
    """

    repeats = 1

    def __init__(self, sizes: Sequence[int], batch_size: int, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        stride = batch_size * world_size
        if small := [size for size in sizes if size < stride]:
            raise ValueError(
                f"a batch of {batch_size} on {world_size} device(s) needs {stride} training samples, but a slice has "
                f"{small[0]}: choose recipe.batch_size of at most {small[0]}, or more samples"
            )
        self.sizes, self.batch_size, self.seed, self.rank, self.world_size = sizes, batch_size, seed, rank, world_size
        self.num_samples = sum(sizes)
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches of a whole epoch on one rank, whatever `start` is."""
        return sum(size // (self.batch_size * self.world_size) for size in self.sizes)

    def __iter__(self) -> Iterator[BatchIndices]:
        stride = self.batch_size * self.world_size
        random = np.random.default_rng(derive_seed(self.seed, self.epoch))
        orders = [random.permutation(size) for size in self.sizes]
        planned = [(index, batch) for index, size in enumerate(self.sizes) for batch in range(size // stride)]
        for turn in random.permutation(len(planned))[self.start :]:
            index, batch = planned[turn]
            rows = orders[index][batch * stride + self.rank : (batch + 1) * stride : self.world_size]
            yield BatchIndices(index, rows)


class SliceSampler(Sampler[BatchIndices]):
    """Yields batches for measuring: every sample of every slice once over all ranks, as many batches on each rank."""

    def __init__(self, sizes: Sequence[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.samplers = [EvaluationSampler(size, batch_size, rank=rank, world_size=world_size) for size in sizes]

    def __len__(self) -> int:
        return sum(map(len, self.samplers))

    def __iter__(self) -> Iterator[BatchIndices]:
        for index, sampler in enumerate(self.samplers):
            for rows in sampler:
                yield BatchIndices(index, rows)
