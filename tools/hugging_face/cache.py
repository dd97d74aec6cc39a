"""The recurrent state of a model as the cache of transformers."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from longseq.backbones.tokens import TokenBackbone, TokenState
from longseq.state import map_state, select_state

# What the installed transformers calls the cache: `cache` from 5.24 on, `past_key_values` before.
CACHE_NAME = next(
    one.name for one in dataclasses.fields(CausalLMOutputWithPast) if one.name in ("cache", "past_key_values")
)

# Layers whose state grows get room for at least so many tokens.
_LEAST_ROOM = 256


class LongseqCache(Cache):
    """The state after the tokens that a model has read, for all layers together.

    Attributes:
        state: None before the first token.
        tokens: how many columns of the batch were read, padding included.
        last: the last column `[B]` of them; None before the first, and for packed sequences.
        is_padding: True at the columns `[B, C]` that were padding; the columns after these are real tokens. None
            before the first column, and for packed sequences.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)  # `generate` then leaves out the tokens of a prompt that the cache has read

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: TokenState | None = None
        self.tokens = 0
        self.last: Tensor | None = None
        self.is_padding: Tensor | None = None
        self._room = 0

    def keep(self, state: TokenState | None, tokens: int, last: Tensor | None, mask: Tensor | None) -> None:
        """Replace the state by the one after `tokens` more columns, which `forward` has returned.

        `mask` is False at padding. Columns without any are not written down, so that a step of one token adds nothing.
        """
        if last is None:
            self.is_padding = None
        elif self.state is None:
            self.is_padding = torch.zeros(len(last), 0, dtype=torch.bool, device=last.device)
        if self.is_padding is not None and mask is not None:
            self.is_padding = torch.cat([self._all_padding(), ~mask.to(self.is_padding.device)], 1)
        self.state, self.last, self._room = state, last, 0
        self.tokens += tokens

    def check_text(self, text: Tensor) -> None:
        """Raise ValueError unless the tokens that were read begin the text `[B, T]`, and more follow.

        Only the last of the read tokens is compared. `generate` leaves out as many as were read.
        """
        begins = text.shape[1] > self.tokens
        if begins and self.last is not None and len(self.last) == len(text):
            begins = torch.equal(text[:, self.tokens - 1].to(self.last.device), self.last)
        if not begins:
            raise ValueError("the cache has read other tokens than the first of this text")

    def check_mask(self, mask: Tensor | None, tokens: int) -> None:
        """Raise ValueError if the mask before the last `tokens` marks other tokens than were read.

        A mask of as many columns as were read must have its real tokens at the same places; one of another width,
        whose padding was cut or widened, as many in each row. `generate` feeds padding to a row that has ended; the
        state keeps it, although a mask of the whole text marks it as padding.
        """
        if mask is None or mask.shape[1] <= tokens or self.state is None or self.is_padding is None:
            return
        read = ~self._all_padding()
        marked = (mask[:, :-tokens] == 1).to(read.device)
        same = marked == read if marked.shape == read.shape else marked.sum(1) == read.sum(1)
        if not bool(same.all()):
            raise ValueError("attention_mask marks other tokens than the cache has read")

    def _all_padding(self) -> Tensor:
        """True at padding, of all columns that were read: `[B, tokens]`."""
        assert self.is_padding is not None
        return functional.pad(self.is_padding, (0, self.tokens - self.is_padding.shape[1]))

    def step(self, model: TokenBackbone, token: Tensor) -> Tensor:
        """Read one more token `[B]`: logits `[B, V]`. A state that grows is moved to twice the room when it is full."""
        assert self.state is not None
        if self._room <= self.tokens:
            self._room = max(2 * self.tokens, _LEAST_ROOM)
            self.state = model.preallocate(self.state, self._room)
        logits, self.state = model.step(token, self.state)
        self.last = token
        self.tokens += 1
        return logits

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # none

    def reset(self) -> None:
        self.state, self.tokens, self.last, self.is_padding, self._room = None, 0, None, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = select_state(self.state, indices)
        self.last = None if self.last is None else self.last[indices]
        self.is_padding = None if self.is_padding is None else self.is_padding[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = map_state(lambda tensor: tensor.repeat_interleave(repeats, dim=0), self.state)
        self.last = None if self.last is None else self.last.repeat_interleave(repeats, dim=0)
        self.is_padding = None if self.is_padding is None else self.is_padding.repeat_interleave(repeats, dim=0)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a recurrent state cannot forget tokens")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tokens={self.tokens})"


def rows_with_padding(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The mask `[B, tokens]` of the last tokens, True at real ones; None where there is no padding.

    Raises:
        ValueError: the mask is not `[B, T]`, or has other values than 0 and 1, such as numbers of packed sequences.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] < tokens:
        raise ValueError(f"attention_mask has the shape {list(attention_mask.shape)}, not [batch, tokens]")
    last = attention_mask[:, -tokens:]
    mask = last == 1
    if bool(mask.all()):
        return None
    if bool((mask == (last == 0)).any()):
        raise ValueError("attention_mask has other values than 0 and 1")
    return mask
