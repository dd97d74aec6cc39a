"""Text that a model in training writes, for TensorBoard."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.sharding import has_shards
from longseq.tasks.text.info import TextInfo
from longseq.tasks.training import targets
from longseq.tasks.training.callbacks.telemetry import evaluating


@targets.register("callback")
class TextSamples(Callback):
    """Adds `val/sample` after each validation: `tokens` tokens that the model writes from the start of a document.

    Each sample of a run begins from the same random numbers. A model that is sharded over processes writes none.
    """

    def __init__(self, tokens: int = 256, temperature: float = 0.8) -> None:
        if tokens < 1 or temperature < 0:
            raise ValueError(
                f"callbacks.text_samples: tokens={tokens} must be at least 1, and temperature={temperature} at least 0"
            )
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
            # Four blanks: TensorBoard reads Markdown, and this is no text of Markdown.
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            board.experiment.add_text("val/sample", shown, trainer.global_step - 1)


def write_sample(model: TokenBackbone, info: TextInfo, tokens: int, temperature: float = 0.8) -> str | None:
    """The beginning of a document as the model writes it, None where its parameters are sharded."""
    if has_shards(model):
        return None
    device = next(model.parameters()).device
    start = torch.tensor([[info.separator]], device=device)
    generator = torch.Generator(device).manual_seed(0)
    with evaluating(model):
        written = model.generate(start, tokens, temperature=temperature, generator=generator)[0, 1:].tolist()
    end = written.index(info.separator) if info.separator in written else len(written)
    return info.make_tokenizer().decode(written[:end])
