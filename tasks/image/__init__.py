"""Image classification."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longseq.tasks.registry import Task


def task() -> Task:
    """The parts of the task."""
    from longseq.tasks.image import config, data, model, module, report
    from longseq.tasks.registry import Task

    return Task(
        config=config.ImageKeys(),
        data=data.ImageDataModule,
        model=model.ImageModel(),
        module=module.ImageClassifier,
        report=report.ImageReport(),
    )
