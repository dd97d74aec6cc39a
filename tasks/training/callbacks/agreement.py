"""The check that all processes of a run have the same data, keys and checkpoint."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed

from longseq.tasks.data.info import Info


class Agreement(Callback):
    """Refuses, before the work, a run or an evaluation whose processes do not read the same.

    Each process reads its configuration, its checkpoint and the names of its data by itself. With a file less than the
    others it would order the samples in another way, or have fewer batches than the others wait for. `facts` are names
    and values that must be the same; the data are those of the Trainer's data module.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self._agreed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._agreed or trainer.world_size == 1:
            return
        data = getattr(trainer.datamodule, "info", None)  # type: ignore[attr-defined]
        info = data if isinstance(data, Info) else None
        first: list[Any] = [self.facts, info]
        distributed.broadcast_object_list(first)
        found: list[Any] = [None] * trainer.world_size
        distributed.all_gather_object(found, (socket.gethostname(), _find_difference(self.facts, info, *first)))
        for rank, (host, difference) in enumerate(found):
            if difference is not None:  # every process ends with the same words, and none waits for another
                raise ValueError(
                    f"process {rank} of this run (on {host}) and process 0 (on {found[0][0]}) {difference}"
                )
        self._agreed = True


def _find_difference(
    facts: Mapping[str, Any], info: Info | None, its_facts: Mapping[str, Any], its: Info | None
) -> str | None:
    """How this process differs from the first one of its run, in words; None if it does not."""
    for name in sorted(facts.keys() | its_facts.keys()):
        if facts.get(name) != its_facts.get(name):
            return f"differ in {name}, {facts.get(name)!r} and {its_facts.get(name)!r}: give all processes the same"
    change = None if info is None or its is None else _find_other_data(info, its)
    return None if change is None else f"read different data: {change}; give all machines the same files"


def _find_other_data(info: Info, its: Info) -> str | None:
    for split, size in info.sizes.items():
        if size != its.sizes.get(split):
            return f"{split} has {size} and {its.sizes.get(split)} samples"
    own, others = info.to_dict(), its.to_dict()
    for name, value in own.items():
        if name != "checksums" and value != others.get(name):
            return f"the {name.replace('_', ' ')} are not the same"
    other = [split for split, checksum in info.checksums.items() if checksum != its.checksums.get(split)]
    return f"{other[0]} has other samples, and as many" if other else None
