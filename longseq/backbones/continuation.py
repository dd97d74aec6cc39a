"""Continues a text by a language model, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from longseq.backbones.sampling import TokenSampler
from longseq.backbones.step_graph import StepGraph

if TYPE_CHECKING:
    from longseq.backbones.tokens import TokenBackbone, TokenState


class Continuation:
    """Draws one token after the other for each row of a batch; the model reads each before the next one is drawn.

    Args:
        model: a `TokenBackbone` in evaluation mode.
        state: the state after the tokens so far, with room for the tokens to come (see `TokenBackbone.preallocate`).
        logits: `[B, vocab_size]`, the scores of the next token.
        sampler: draws from the scores.
        cuda_graph: record the step and the sampler as one `StepGraph`, and replay it.

    Attributes:
        state: the state before the token that was drawn last, or after it once `read` was called; likewise `logits`.
        graph: the `StepGraph`, once there is one.

    Raises:
        ValueError: a graph cannot record the model or its state.
    """

    def __init__(
        self,
        model: TokenBackbone,
        state: TokenState,
        logits: Tensor,
        sampler: TokenSampler,
        *,
        cuda_graph: bool = False,
    ) -> None:
        self.model, self.state, self.sampler = model, state, sampler
        self.cuda_graph = cuda_graph
        self.graph: StepGraph | None = None
        self._logits = logits
        self._token: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The scores `[B, vocab_size]` of the token that follows."""
        return self._logits if self.graph is None else self.graph.logits

    def draw(self) -> Tensor:
        """Return the next token of each row: `[B]`."""
        if self._token is None:
            self._token = self.sampler(self.logits)
        elif self.cuda_graph:
            # A copy: the next replay overwrites what the graph returns.
            self._token = self._replay(self._token).clone()
        else:
            self.read()
            self._token = self.sampler(self.logits)
        return self._token

    def read(self) -> None:
        """Read the token that was drawn last: `state` and `logits` are then those of the whole text."""
        assert self._token is not None, "nothing was drawn"
        if self.cuda_graph:
            self._replay(self._token)
        else:
            self._logits, self.state = self.model.step(self._token, self.state)

    def _replay(self, token: Tensor) -> Tensor:
        if self.graph is None:
            self.graph = StepGraph(self.model, self.state, self.sampler)
            self.state = self.graph.state
            self.graph.token.copy_(token)
        self.graph.replay()
        return self.graph.token
