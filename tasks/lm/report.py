"""The report of a run of a language model, with a sample of its text."""

from __future__ import annotations

from typing import Any

import torch

from longseq.blocks.sharding import has_shards
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.report import Report
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.training.callbacks.kernels import evaluating

_SAMPLE = 400  # tokens of the sample that a run prints at its end


class LanguageModelReport(Report):
    """Adds the perplexity by position, a sample, and the command that generates text."""

    headline = ("bits_per_byte", "perplexity", "loss")

    def extras(self, module: LanguageModelTask, info: TextInfo, split: str) -> dict[str, Any]:
        return {f"{split}/perplexity_by_position": module.by_position}

    def closing(self, module: LanguageModelTask, info: TextInfo) -> str | None:
        """A text from the start of a document; none of a model whose parameters are sharded."""
        model: Any = module.backbone
        if has_shards(model):
            return None
        tokens = _SAMPLE if model.max_length is None else min(_SAMPLE, model.max_length - 1)  # the separator takes one
        device = next(model.parameters()).device
        start = torch.tensor([[info.separator]], device=device)
        generator = torch.Generator(device).manual_seed(0)
        with evaluating(model):
            written = model.generate(start, tokens, temperature=0.8, generator=generator)[0, 1:].tolist()
        end = written.index(info.separator) if info.separator in written else len(written)
        text = info.make_tokenizer().decode(written[:end])
        return f"\nThe model writes, from the start of a document:\n\n{text}"

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq generate {checkpoint} prompt=TEXT"]
