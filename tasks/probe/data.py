"""The data module of the probes: generated sets, loaders, and what the model must know of the sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from longseq.tasks.config import read
from longseq.tasks.data.loader import BatchLoader, TrainingLoader, find_place, follow
from longseq.tasks.data.module import TaskData
from longseq.tasks.probe.batches import MixtureSampler, SliceBatches, SliceSampler
from longseq.tasks.probe.config import SPLITS, ProbeDataKeys
from longseq.tasks.probe.generators import GENERATORS, generator_options
from longseq.tasks.probe.info import ProbeInfo
from longseq.tasks.probe.slices import Slice, make_splits

# The split that each stage of a run evaluates.
STAGES = {"val": "validation", "test": "test"}


class ProbeDataModule(TaskData):
    """Generated sequences for training, validation and test; see `longseq.tasks.probe.generators`.

    Each of `train`, `validation` and `test` is a list of slices: `samples`, an optional `name`, and options of the
    generator that replace those of `options`. Samples are functions of (`draw_seed`, slice), so that runs with
    different seeds share them; no sample occurs more than once. With `cache`, they are saved in a file of that folder.
    Batches are (tokens `[B, T]`, ProbeTargets), gathered from tensors on the device; their order is a function of
    (`seed`, epoch).
    """

    info_class = ProbeInfo

    def __init__(
        self,
        keys: ProbeDataKeys,
        *,
        batch_size: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.keys = keys = read(ProbeDataKeys, vars(keys), "data")
        self.described = {split: getattr(keys, split) for split in SPLITS}
        self.batch_size, self.eval_batch_size = batch_size, keys.eval_batch_size or batch_size
        self.seed = seed
        self._splits: dict[str, list[Slice]] | None = None
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
        options = {**config["data"]["options"], **changes.get("options", {})}
        changes = {**changes, "options": options}
        datamodule = super().for_evaluation(config, changes, split=split, trained=trained, batch_size=batch_size)
        # The trainer's test stage evaluates either split, under the names of that split's slices.
        datamodule._info = replace(datamodule.info, slices=dict.fromkeys(STAGES, datamodule.info.slices[split]))
        return datamodule

    @property
    def info(self) -> ProbeInfo:
        """What models and checkpoints need to know of the data; available after `setup`."""
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
        assert self._splits is not None, "call setup() first"
        return self._splits[split]

    def setup(self, stage: str | None = None) -> None:
        """Generate the sets, or read them from the cache; a second call does nothing."""
        if self._splits is not None:
            return
        keys = self.keys
        vocab_size = (generator_options(keys.generator) | dict(keys.options))["vocab_size"]
        self._splits = make_splits(keys.generator, keys.options, self.described, seed=keys.draw_seed, folder=keys.cache)
        counts = {split: sum(len(one.tokens) for one in slices) for split, slices in self._splits.items()}
        self._info = ProbeInfo(
            generator=keys.generator,
            vocab_size=vocab_size,
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
