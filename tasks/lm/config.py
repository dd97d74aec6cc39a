"""The configuration keys of language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from longseq.tasks.config import Keys, TaskKeys, key
from longseq.tasks.text.keys import TextDataKeys
from longseq.tasks.training.configuration import TokenModelKeys


class LossKeys(Keys):
    """The keys of `recipe.loss`."""

    z_loss: Annotated[float, Field(ge=0)] = key(0.0, "the weight of the penalty on the normalizers, 1e-4 in PaLM")


class CausalModelKeys(TokenModelKeys):
    """The keys of `model`. In another direction a model would see the tokens that it predicts."""

    direction: Literal["forward"] | None = key(None, "forward")


@dataclass(frozen=True)
class LanguageModelKeys(TaskKeys):
    """The keys of language models."""

    data: type[Keys] = TextDataKeys
    model: type[Keys] = CausalModelKeys
    loss: type[Keys] | None = LossKeys
