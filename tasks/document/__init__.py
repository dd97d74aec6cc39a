"""Document classifiers: the class, or the classes, of a whole text."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.document import config, data, model, module, report

    return Task(
        config=config.DocumentKeys(),
        data=data.DocumentData,
        model=model.DocumentModel(),
        module=module.DocumentTask,
        report=report.DocumentReport(),
    )
