"""Image classification."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.image import config, data, model, module

    return Task(
        config=config.ImageKeys(),
        data=data.ImageDataModule,
        model=model.ImageModel(),
        module=module.ImageClassifier,
        report=module.ImageReport(),
    )
