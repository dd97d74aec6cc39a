"""Probes: generated tasks on which mixers differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.probe import config, data, model, module, report
    from longseq.tasks.registry import Task

    return Task(
        config=config.ProbeKeys(),
        data=data.ProbeDataModule,
        model=model.ProbeModel(),
        module=module.ProbeTask,
        report=report.ProbeReport(),
    )
