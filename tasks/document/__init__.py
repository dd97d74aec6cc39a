"""Document classifiers: the class, or the classes, of a whole text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.document import config, data, model, module, report
    from longseq.tasks.registry import Task

    return Task(
        config=config.DocumentKeys(),
        data=data.DocumentData,
        model=model.DocumentModel(),
        module=module.DocumentTask,
        report=report.DocumentReport(),
    )
