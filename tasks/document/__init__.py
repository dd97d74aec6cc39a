"""Document classifiers: the class, or the classes, of a whole text."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.document import config, data, model, module, report

    return Task(
        config.DocumentKeys(), data.DocumentData, model.DocumentModel(), module.DocumentTask, report.DocumentReport()
    )
