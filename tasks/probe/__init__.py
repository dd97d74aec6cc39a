"""Probes: generated tasks on which mixers differ."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.probe import config, data, model, module, report

    return Task(
        config=config.ProbeKeys(),
        data=data.ProbeDataModule,
        model=model.ProbeModel(),
        module=module.ProbeTask,
        report=report.ProbeReport(),
    )
