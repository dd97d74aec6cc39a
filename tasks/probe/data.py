"""The data module of the probes: generated sets and their loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from longseq.tasks.config import read
from longseq.tasks.data.info import Info
from longseq.tasks.data.loader import BatchLoader, TrainingLoader, find_place, follow
from longseq.tasks.data.module import TaskData
from longseq.tasks.probe.config import SPLITS, ProbeDataKeys
from longseq.tasks.probe.generators import GENERATORS, generator_options
from longseq.tasks.probe.slices import MixtureSampler, Slice, SliceBatches, SliceSampler, make_splits

# The split that each stage of a run evaluates.
STAGES = {"val": "validation", "test": "test"}


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
    different seeds share the samples; none occurs twice. Batches are (tokens `[B, T]`, ProbeTargets),
    gathered from tensors on the device.
    """

    info_class = ProbeInfo

    def __init__(self, keys: ProbeDataKeys, *, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        self.keys = keys = read(ProbeDataKeys, vars(keys), "data")
        self.batch_size, self.eval_batch_size = batch_size, keys.eval_batch_size or batch_size
        self.seed = seed
        self._splits: dict[str, list[Slice]] = {}
        self._info: ProbeInfo | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> ProbeDataModule:
        datamodule = cls(read(ProbeDataKeys, config["data"], "data"), batch_size=batch_size, seed=config["seed"])
        datamodule.setup()
        return datamodule

    @classmethod
    def for_evaluation(
        cls,
        config: Mapping[str, Any],
        changes: Mapping[str, Any],
        *,
        split: str,
        trained: ProbeInfo,
        batch_size: int,
    ) -> ProbeDataModule:
        changes = {**changes, "options": {**config["data"]["options"], **changes.get("options", {})}}
        datamodule = super().for_evaluation(config, changes, split=split, trained=trained, batch_size=batch_size)
        # The trainer's test stage evaluates either split and reports it under the names of that split's slices.
        datamodule._info = replace(datamodule.info, slices=dict.fromkeys(STAGES, datamodule.info.slices[split]))
        return datamodule

    @property
    def info(self) -> ProbeInfo:
        """The info of the sets; available after `setup`."""
        assert self._info is not None, "call setup() first"
        return self._info

    @property
    def registered_parts(self) -> list[Any]:
        return [GENERATORS[self.keys.generator]]

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one device in an epoch."""
        return len(self._training_sampler())

    @property
    def tokens_per_epoch(self) -> int:
        sampler = self._training_sampler()
        size = sampler.effective_batch_size
        return sum(len(one.tokens) // size * size * one.tokens.shape[1] for one in self.slices("train"))

    def slices(self, split: str) -> list[Slice]:
        """The slices of train, validation or test; available after `setup`."""
        return self._splits[split]

    def setup(self, stage: str | None = None) -> None:
        """Generate the sets; a second call does nothing."""
        if self._splits:
            return
        keys = self.keys
        described = {split: getattr(keys, split) for split in SPLITS}
        self._splits = make_splits(keys.generator, keys.options, described, seed=keys.draw_seed)
        counts = {split: sum(len(one.tokens) for one in slices) for split, slices in self._splits.items()}
        self._info = ProbeInfo(
            generator=keys.generator,
            vocab_size=(generator_options(keys.generator) | keys.options)["vocab_size"],
            longest=max(one.tokens.shape[1] for slices in self._splits.values() for one in slices),
            rebuild=keys.generator == "compression",
            slices={stage: [one.name for one in self._splits[split]] for stage, split in STAGES.items()},
            sizes={"train": counts["train"], "val": counts["validation"], "test": counts["test"]},
        )

    def train_dataloader(self) -> TrainingLoader:
        return TrainingLoader(
            SliceBatches(self._on_device("train")),  # type: ignore[arg-type]
            self._training_sampler(),  # type: ignore[arg-type]
            **follow(self.trainer),
        )

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: str) -> BatchLoader:
        rank, world_size, _ = find_place(self.trainer)
        sizes = [len(one.tokens) for one in self.slices(split)]
        return BatchLoader(
            SliceBatches(self._on_device(split)),  # type: ignore[arg-type]
            SliceSampler(sizes, self.eval_batch_size, rank=rank, world_size=world_size),  # type: ignore[arg-type]
        )

    def _training_sampler(self) -> MixtureSampler:
        sizes = [len(one.tokens) for one in self.slices("train")]
        return MixtureSampler(sizes, self.batch_size, seed=self.seed, **find_place(self.trainer)._asdict())

    def _on_device(self, split: str) -> list[Slice]:
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return [one.to(device) for one in self.slices(split)]
