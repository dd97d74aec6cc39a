"""Numbers of tokens that an exported file reads."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["refuse_negative"]


def refuse_negative(tokens: Tensor, vocab_size: int) -> Tensor:
    """The tokens, and `vocab_size`, which no embedding has, in place of negative ones.

    ONNX counts negative numbers from the end: -1 would be read as the last token.
    """
    return torch.where(tokens < 0, vocab_size, tokens)
