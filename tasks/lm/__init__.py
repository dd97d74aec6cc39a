"""Causal language models: the next token of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longseq.tasks.registry import Task


def task() -> Task:
    """The five parts of the task."""
    from longseq.tasks.lm import config, data, model, module, report
    from longseq.tasks.registry import Task

    return Task(
        config=config.LanguageModelKeys(),
        data=data.LanguageModelData,
        model=model.LanguageModel(),
        module=module.LanguageModelTask,
        report=report.LanguageModelReport(),
    )
