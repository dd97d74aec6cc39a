"""The data of the probes: slices of one generator for each split, their batches, and the data module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from longseq.tasks.data.generators import IGNORED, Integers, Samples, draw
from longseq.tasks.data.info import STAGES, Info
from longseq.tasks.data.loader import Batch, BatchLoader, TrainingLoader, find_place
from longseq.tasks.data.module import TaskData
from longseq.tasks.data.sampler import EvaluationSampler, UpdateSampler, derive_seed
from longseq.tasks.probe.config import ProbeDataKeys
from longseq.tasks.probe.generators import GENERATORS, generator_options

_OWN_KEYS = ("samples", "name")  # keys of a slice that are not options of its generator


class Slice(NamedTuple):
    """Sequences of one setting, and their questions.

    tokens: `[N, T]`.
    places: `[N, A]`, the positions of questions; rows with fewer questions end in zeros.
    answers: `[N, A]`, IGNORED after the row's own questions.
    allowed: `[N, A]`, bits of the right answers; None if only the answer is right.
    """

    name: str
    tokens: Tensor
    places: Tensor
    answers: Tensor
    allowed: Tensor | None

    def to(self, device: torch.device) -> Slice:
        """The same slice on a device."""
        return Slice(self.name, *(None if part is None else part.to(device) for part in self[1:]))  # type: ignore[arg-type]


def make_splits(
    generator: str, options: Mapping[str, Any], splits: Mapping[str, Any], *, seed: int
) -> dict[str, list[Slice]]:
    """Make the slices of each split; no sample occurs twice, within a split or across splits.

    A slice has `samples`, an optional `name`, and options of the generator that replace `options`.
    """
    options = generator_options(generator) | dict(options)
    seen: Integers = np.zeros(0, dtype=np.uint64)
    made: dict[str, list[Slice]] = {}
    for number, (split, listed) in enumerate(splits.items()):
        made[split] = []
        for index, (described, name) in enumerate(zip(listed, slice_names(listed), strict=True)):
            own = {key: value for key, value in described.items() if key not in _OWN_KEYS}
            random = np.random.default_rng(derive_seed(seed, number, index))
            samples, seen = draw(partial(GENERATORS[generator], **(options | own)), random, described["samples"], seen)
            made[split].append(_find_questions(name, samples))
    return made


def slice_names(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of each slice: its own, or its options' values, such as `512x64`."""
    names = []
    for index, described in enumerate(listed):
        values = [value for key, value in described.items() if key not in _OWN_KEYS]
        name = described.get("name") or "x".join(str(value) for value in values) or f"slice{index}"
        names.append("".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name))
    return [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]


def _find_questions(name: str, samples: Samples) -> Slice:
    labelled = samples.labels != IGNORED
    count = int(labelled.sum(axis=1).max())
    # Sorting blocks of rows bounds the memory.
    blocks = [labelled[start : start + 8192] for start in range(0, len(labelled), 8192)]
    places = np.concatenate([np.argsort(~rows, axis=1, kind="stable")[:, :count] for rows in blocks])
    answers = np.take_along_axis(samples.labels, places, axis=1)
    allowed = None if samples.allowed is None else torch.from_numpy(np.take_along_axis(samples.allowed, places, axis=1))
    places = np.where(answers == IGNORED, 0, places).astype(np.int32)
    return Slice(name, torch.from_numpy(samples.tokens), torch.from_numpy(places), torch.from_numpy(answers), allowed)


class ProbeTargets(NamedTuple):
    """The questions of a batch: `places`, `answers` and `allowed` `[B, A]` as in `Slice`, and the slice's number."""

    places: Tensor
    answers: Tensor
    allowed: Tensor | None
    slice_index: int


class BatchIndices(NamedTuple):
    """The rows of one slice that make a batch."""

    slice_index: int
    rows: Any


class SliceBatches(Dataset[Batch]):
    """Maps BatchIndices to a batch: tokens `[B, T]` and ProbeTargets."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = slices

    def __getitem__(self, indices: BatchIndices) -> Batch:
        chosen = self.slices[indices.slice_index]
        rows = torch.as_tensor(indices.rows, dtype=torch.long).to(chosen.tokens.device, non_blocking=True)
        tokens, *own = (None if part is None else part.index_select(0, rows).long() for part in chosen[1:])
        return Batch(tokens, ProbeTargets._make([*own, indices.slice_index]), [])


class MixtureSampler(UpdateSampler[BatchIndices]):
    """Yields the rows of each batch, all of one slice.

    An epoch shuffles each slice, cuts it into effective batches, and shuffles these. ValueError for a smaller slice.
    """

    def __init__(self, sizes: Sequence[int], batch_size: int, *, seed: int, **place: int) -> None:
        super().__init__(batch_size, seed=seed, **place)
        if min(sizes) < self.effective_batch_size:
            raise ValueError(f"an update needs {self.effective_batch_size} samples of a slice of {min(sizes)}")
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
    """Yields evaluation batches: each sample of each slice once over all ranks, and as many batches on each rank."""

    def __init__(self, sizes: Sequence[int], batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.world_size = world_size
        self.samplers = [EvaluationSampler(size, batch_size, rank=rank, world_size=world_size) for size in sizes]

    def keep_order(self) -> None:
        """Read the samples of each slice in order, one slice after the other, as predictions need."""
        for sampler in self.samplers:
            sampler.keep_order()

    def __len__(self) -> int:
        return sum(map(len, self.samplers))

    def __iter__(self) -> Iterator[BatchIndices]:
        for index, sampler in enumerate(self.samplers):
            for rows in sampler:
                yield BatchIndices(index, rows)


@dataclass(frozen=True)
class ProbeInfo(Info):
    """What a model and a checkpoint must know of a probe.

    `longest` is the longest sequence of all splits, in tokens. With `rebuild`, the model must reproduce the whole
    sequence from its last feature. `slices` names the slices of val and test; `sizes` counts sequences.
    """

    generator: str
    vocab_size: int
    longest: int
    rebuild: bool
    slices: dict[str, list[str]] = field(default_factory=dict)

    def describe(self) -> str:
        """The probe in a few words."""
        return f"{self.vocab_size} tokens, sequences of at most {self.longest}"


class ProbeDataModule(TaskData):
    """Generated sequences for training, validation and test; see `longseq.tasks.probe.generators`.

    Each of `train`, `validation` and `test` is a list of slices: `samples`, an optional `name`, and options of the
    generator that replace `options`. `draw_seed` decides the samples and `seed` only their order, so that runs with
    different seeds share the samples; none occurs twice. Batches are (tokens `[B, T]`, ProbeTargets) on the device.
    """

    keys_class, info_class = ProbeDataKeys, ProbeInfo

    slices: Mapping[str, list[Slice]] = {}  # of train, val and test; set by `setup`

    @classmethod
    def for_evaluation(
        cls, config: Mapping[str, Any], changes: Mapping[str, Any], *, split: str, trained: ProbeInfo, batch_size: int
    ) -> ProbeDataModule:
        changes = {**changes, "options": {**config["data"]["options"], **changes.get("options", {})}}
        datamodule = super().for_evaluation(config, changes, split=split, trained=trained, batch_size=batch_size)
        # The trainer's test stage evaluates either split and reports it under the names of that split's slices.
        names = datamodule.info.slices[split]
        datamodule._info = replace(datamodule.info, slices={"val": names, "test": names})
        return datamodule

    @property
    def registered_parts(self) -> list[Any]:
        return [GENERATORS[self.keys.generator]]

    @property
    def tokens_per_epoch(self) -> int:
        sampler = self.training_sampler()
        size = sampler.effective_batch_size
        return sum(len(one.tokens) // size * size * one.tokens.shape[1] for one in self.slices["train"])

    def setup(self, stage: str | None = None) -> None:
        if self.slices:
            return
        keys = self.keys
        described = {stage: getattr(keys, split) for stage, split in STAGES.items()}
        self.slices = found = make_splits(keys.generator, keys.options, described, seed=keys.draw_seed)
        self._info = ProbeInfo(
            generator=keys.generator,
            vocab_size=(generator_options(keys.generator) | keys.options)["vocab_size"],
            longest=max(one.tokens.shape[1] for slices in found.values() for one in slices),
            rebuild=keys.generator == "compression",
            slices={stage: [one.name for one in found[stage]] for stage in ("val", "test")},
            sizes={stage: sum(len(one.tokens) for one in slices) for stage, slices in found.items()},
        )

    def train_dataloader(self) -> TrainingLoader:
        return self.training_loader(self._batches("train"), self.training_sampler())

    def evaluation_loader(self, stage: str) -> BatchLoader:
        rank, world_size, _ = find_place(self.trainer)
        sizes = [len(one.tokens) for one in self.slices[stage]]
        sampler = SliceSampler(sizes, self.eval_batch_size, rank=rank, world_size=world_size)
        return BatchLoader(self._batches(stage), sampler)

    def training_sampler(self) -> MixtureSampler:
        sizes = [len(one.tokens) for one in self.slices["train"]]
        return MixtureSampler(sizes, self.batch_size, seed=self.seed, **find_place(self.trainer)._asdict())

    def _batches(self, stage: str) -> SliceBatches:
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return SliceBatches([one.to(device) for one in self.slices[stage]])
