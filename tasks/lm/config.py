"""The configuration keys of language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from longseq.tasks.text.keys import TextDataKeys
from longseq.tasks.training.command import refuse_inert
from longseq.tasks.training.keys import TaskKeys
from longseq.tasks.training.options import Range, read
from longseq.tasks.training.token_keys import TokenModelKeys


@dataclass(frozen=True, kw_only=True)
class LossKeys:
    """The keys of `recipe.loss`, explained in `longseq.tasks.lm.module.LanguageModelTask`."""

    z_loss: Annotated[float, Range(0)] = 0.0


@dataclass(frozen=True)
class LanguageModelKeys(TaskKeys):
    """The keys of language models."""

    data: type = TextDataKeys
    loss: type | None = LossKeys

    def check(self, config: Mapping[str, Any]) -> None:
        direction = read(TokenModelKeys, config["model"], "model").direction
        refuse_inert("model", config["model"], TokenModelKeys.inert_with)
        if direction not in (None, "forward"):
            raise ValueError(
                f"model.direction={direction} lets a model see the tokens that it is to predict: take direction=forward"
            )
        if config["recipe"].get("model"):
            raise ValueError("recipe.model is read by no part of task=lm: leave it out with ~recipe.model")
