"""Bounds of a machine: its GPUs, and the processes that its cores can serve."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch

from longseq.tasks.training import processes
from longseq.tasks.training.trainer import refuse_absent_devices


@pytest.mark.parametrize(
    ("trainer", "there", "told"),
    [
        (
            {"accelerator": "gpu", "devices": 9},
            2,
            "trainer.devices=9: torch sees 2 GPU(s) here; give trainer.devices=2",
        ),
        ({"accelerator": "cuda"}, 0, "trainer.accelerator=cuda: torch sees no GPU here; give trainer=cpu"),
        ({"accelerator": "gpu", "devices": 2}, 2, None),
        ({"accelerator": "gpu", "devices": "auto"}, 1, None),
        ({"accelerator": "gpu", "devices": [0, 1]}, 2, None),
        ({"accelerator": "auto", "devices": 9}, 0, None),
        ({}, 0, None),
    ],
)
def test_gpus_that_are_not_there_are_refused(monkeypatch, trainer, there, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape(told)) if told else nullcontext():
        refuse_absent_devices(trainer)


@pytest.mark.parametrize(("cores", "most"), [(1, 64), (8, 64), (32, 256)])
def test_more_processes_than_cores_serve_are_refused(monkeypatch, cores, most):
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    for count in (None, 0, most):
        processes.refuse_many(count, "data.num_workers")
    with pytest.raises(ValueError, match=rf"data\.num_workers={most + 1} .* give at most {most}$"):
        processes.refuse_many(most + 1, "data.num_workers")
