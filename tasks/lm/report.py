"""What a run of a language model reports beside its metrics."""

from __future__ import annotations

from typing import Any

from longseq.tasks.lm import samples  # noqa: F401  registers the callback of this task
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.report import Report
from longseq.tasks.text.info import TextInfo


class LanguageModelReport(Report):
    """Adds the perplexity by position, gzip's figure on the same text, and the command that generates."""

    headline = ("bits_per_byte", "perplexity", "loss")

    def extras(self, module: LanguageModelTask, info: TextInfo, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {f"{split}/perplexity_by_position": module.by_position}
        if split == "test" and info.gzip_bits_per_byte is not None:
            found["test/gzip_bits_per_byte"] = info.gzip_bits_per_byte
        return found

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq generate checkpoint={checkpoint} prompt=..."]
