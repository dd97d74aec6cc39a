"""Image classification."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.image import config, data, model, module

    return Task(
        config.ImageKeys(), data.ImageDataModule, model.ImageModel(), module.ImageClassifier, module.ImageReport()
    )
