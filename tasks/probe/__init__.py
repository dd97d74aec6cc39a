"""Probes: generated tasks on which mixers differ."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.probe import config, data, module

    return Task(
        config=config.ProbeKeys(),
        data=data.ProbeDataModule,
        model=module.ProbeModel(),
        module=module.ProbeTask,
        report=module.ProbeReport(),
    )
