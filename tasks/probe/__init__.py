"""Probes: generated tasks on which mixers differ."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.probe import config, data, module

    return Task(config.ProbeKeys(), data.ProbeDataModule, module.ProbeModel(), module.ProbeTask, module.ProbeReport())
