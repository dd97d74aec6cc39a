"""The models of this task, and the state that a stream carries from one batch to the next."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.rotary import count_positions
from longseq.mixers import Mixer
from longseq.state import fill_state, map_state, select_state, state_tensors
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.text.windows import TokenInputs
from longseq.tasks.training.checkpoint import Loaded
from longseq.tasks.training.token_model import TokenModel, build_token_model, check_tokenizer


class LanguageModel(TokenModel):
    """Builds token models that read forward."""

    def build(self, config: Mapping[str, Any], info: TextInfo) -> TokenBackbone:
        return build_token_model(config, vocab_size=info.vocab_size, longest=info.window)

    def start_from(self, model: Any, loaded: Loaded, info: TextInfo) -> None:
        """As `TaskModel.start_from`; ValueError also for weights that were trained with another tokenizer."""
        check_tokenizer(loaded, info.tokenizer)
        super().start_from(model, loaded, info)


class CarriedState:
    """The recurrent state of each row of a batch, for the batch that continues the rows; `saved` are its `tensors`.

    Gradients end where a batch begins (truncated backpropagation through time). ValueError for a growing state.
    """

    def __init__(self, model: Any, saved: Sequence[Tensor] = ()) -> None:
        growing = {type(part).__name__ for part in model.modules() if isinstance(part, Mixer) and part.growing_state}
        if growing:
            raise ValueError(f"data.packing=streams: the state of {', '.join(sorted(growing))} grows with every token")
        self.model = model
        # At the end of each row of the last batch.
        self.rows: Any = fill_state(model.initial_state(1), saved) if saved else None

    def start(self, inputs: TokenInputs) -> Any:
        """The state of each sequence of a batch before its first token."""
        carry, device = inputs.carry, inputs.tokens.device
        assert carry is not None
        start = self.model.initial_state(inputs.sequences, device, next(self.model.parameters()).dtype)
        if self.rows is None:
            return start
        continued = []
        for (_, begun), row in zip(state_tensors(start), self.tensors(), strict=True):
            fresh = carry.fresh.view(-1, *[1] * (begun.ndim - 1))
            chosen = torch.where(fresh, begun.index_select(0, carry.first), row.to(device, begun.dtype))
            continued.append(begun.index_copy(0, carry.first, chosen))
        return fill_state(start, continued)

    def keep(self, inputs: TokenInputs, state: Any) -> None:
        """Keep the state at the end of each row of a batch, from the final state of all its sequences."""
        assert inputs.carry is not None
        self.rows = select_state(map_state(torch.Tensor.detach, state), inputs.carry.last)

    def tensors(self) -> list[Tensor]:
        """The tensors for a checkpoint."""
        return [] if self.rows is None else [tensor for _, tensor in state_tensors(self.rows)]


class CarriedPositions:
    """Counts the tokens of each sequence over all batches of a stream."""

    def __init__(self) -> None:
        self.read: Tensor | None = None  # `[B]`, the tokens so far of the sequence at the end of each row

    def count(self, inputs: TokenInputs) -> Tensor:
        """The position of each token in its sequence, in the shape of the tokens; needs the batches in their order."""
        tokens, carry, packing = inputs.tokens, inputs.carry, inputs.packing
        if carry is None:
            return count_positions(tokens, cu_seqlens=packing, mask=inputs.mask)[0]
        start = torch.zeros(inputs.sequences, dtype=torch.long, device=tokens.device)
        if self.read is not None:
            start = start.index_copy(0, carry.first, torch.where(carry.fresh, 0, self.read))
        positions, after = count_positions(tokens, start, cu_seqlens=packing)
        self.read = after.index_select(0, carry.last)
        return positions
