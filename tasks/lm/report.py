"""The report of a run of a language model, in addition to its metrics."""

from __future__ import annotations

from typing import Any

from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.lm.samples import write_sample
from longseq.tasks.report import Report
from longseq.tasks.text.info import TextInfo

_SAMPLE = 400  # tokens of the sample that a run prints at its end


class LanguageModelReport(Report):
    """Adds the perplexity by position, gzip's bits per byte for the same text, a sample, and the generating command."""

    headline = ("bits_per_byte", "perplexity", "loss")

    def extras(self, module: LanguageModelTask, info: TextInfo, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {f"{split}/perplexity_by_position": module.by_position}
        if split == "test" and info.gzip_bits_per_byte is not None:
            found["test/gzip_bits_per_byte"] = info.gzip_bits_per_byte
        return found

    def rows(self, module: LanguageModelTask, info: TextInfo) -> list[tuple[str, str]]:
        gzip = info.gzip_bits_per_byte
        return [] if gzip is None else [("bits per byte of gzip -9", f"{gzip:.4f}")]

    def closing(self, module: LanguageModelTask, info: TextInfo) -> str | None:
        text = write_sample(module.backbone, info, _SAMPLE)  # type: ignore[arg-type]
        return None if text is None else f"\nThe model writes, from the start of a document:\n\n{text}"

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq generate {checkpoint} prompt=TEXT"]
