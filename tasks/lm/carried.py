"""The recurrent state that is passed from one batch of a stream to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longseq.backbones.tokens import TokenBackbone
from longseq.mixers import Mixer
from longseq.state import map_state, select_state, state_tensors
from longseq.tasks.text.batch import TokenInputs


class CarriedState:
    """Keeps the recurrent state of each row of a batch, for the batch that continues the rows.

    Gradients end where a batch begins (truncated backpropagation through time). ValueError for a model whose state
    grows with every token: its batches would have no fixed shape.
    """

    def __init__(self, model: TokenBackbone) -> None:
        growing = {type(part).__name__ for part in model.modules() if isinstance(part, Mixer) and part.growing_state}
        if growing:
            raise ValueError(
                f"the state of {', '.join(sorted(growing))} grows with every token and cannot go on from batch to "
                "batch: choose another mixer, or data whose windows each begin anew in place of streams"
            )
        self.model = model
        self.rows: Any = None  # the state of each row of the last batch

    def start(self, inputs: TokenInputs) -> Any:
        """The state of each sequence of a batch before its first token."""
        carry, device = inputs.carry, inputs.tokens.device
        assert carry is not None
        sequences = len(inputs.tokens) if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
        start = self.model.initial_state(sequences, device)
        if self.rows is None:
            return start
        rows = map_state(lambda x: x.to(device), self.rows)
        places = torch.arange(sequences, device=device) if carry.first is None else carry.first
        kept = ~carry.fresh
        return _blend(start, rows, places, kept)

    def keep(self, inputs: TokenInputs, state: Any) -> None:
        """Keep the state with which each row of the batch ends."""
        carry = inputs.carry
        assert carry is not None
        state = map_state(torch.Tensor.detach, state)
        self.rows = state if carry.last is None else select_state(state, carry.last)

    def tensors(self) -> list[Tensor]:
        """The tensors for a checkpoint."""
        return [] if self.rows is None else [tensor for _, tensor in state_tensors(self.rows)]

    def restore(self, tensors: list[Tensor]) -> None:
        """Continue with what `tensors` returned."""
        found = iter(tensors)
        self.rows = map_state(lambda _: next(found), self.model.initial_state(1)) if tensors else None


def _blend(start: Any, rows: Any, places: Tensor, kept: Tensor) -> Any:
    """`start`, with `rows` at `places` where `kept`."""
    if start is None:
        return None
    if not isinstance(start, Tensor):
        parts = [_blend(one, other, places, kept) for one, other in zip(start, rows, strict=True)]
        return type(start)(*parts) if hasattr(start, "_fields") else type(start)(parts)
    wanted = kept.view(-1, *[1] * (start.ndim - 1))
    chosen = torch.where(wanted, rows.to(start.dtype), start.index_select(0, places))
    return start.index_copy(0, places, chosen)
