"""Causal language models: the next token of a text."""

from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.lm import config, data, model, module

    return Task(
        config.LanguageModelKeys(),
        data.LanguageModelData,
        model.LanguageModel(),
        module.LanguageModelTask,
        module.LanguageModelReport(),
    )
