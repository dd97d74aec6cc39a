"""The report of a run of a language model, and samples of its text during training."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.sharding import has_shards
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.report import Report
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.charts import evaluating

_SAMPLE = 400  # tokens of the sample that a run prints at its end


class LanguageModelReport(Report):
    """Adds the perplexity by position, a sample, and the command that generates text."""

    headline = ("bits_per_byte", "perplexity", "loss")

    def extras(self, module: LanguageModelTask, info: TextInfo, split: str) -> dict[str, Any]:
        return {f"{split}/perplexity_by_position": module.by_position}

    def closing(self, module: LanguageModelTask, info: TextInfo) -> str | None:
        text = write_sample(module.backbone, info, _SAMPLE)  # type: ignore[arg-type]
        return None if text is None else f"\nThe model writes, from the start of a document:\n\n{text}"

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq generate {checkpoint} prompt=TEXT"]


@targets.register("callback")
class TextSamples(Callback):
    """Adds `val/sample` to TensorBoard after each validation: the start of a document, `tokens` tokens long.

    Every sample of a run uses the same random numbers. A model whose parameters are sharded generates none.
    """

    def __init__(self, tokens: int = 256, temperature: float = 0.8) -> None:
        self.tokens = tokens
        self.temperature = temperature

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        board = next((logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)
        if board is None or not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
            return
        module: Any = pl_module
        with trainer.precision_plugin.forward_context():
            text = write_sample(module.backbone, module.info, self.tokens, self.temperature)
        if text is not None:
            # TensorBoard reads Markdown, in which four blanks make a literal block.
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            board.experiment.add_text("val/sample", shown, trainer.global_step - 1)


def write_sample(model: TokenBackbone, info: TextInfo, tokens: int, temperature: float = 0.8) -> str | None:
    """The start of a document that the model generates; None if its parameters are sharded.

    It has at most `tokens` tokens, and no more than the model has learned positions.
    """
    if has_shards(model):
        return None
    if model.max_length is not None:
        tokens = min(tokens, model.max_length - 1)  # the separator takes a position
    device = next(model.parameters()).device
    start = torch.tensor([[info.separator]], device=device)
    generator = torch.Generator(device).manual_seed(0)
    with evaluating(model):
        written = model.generate(start, tokens, temperature=temperature, generator=generator)[0, 1:].tolist()
    end = written.index(info.separator) if info.separator in written else len(written)
    return info.make_tokenizer().decode(written[:end])
