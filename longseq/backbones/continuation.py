"""What a language model writes behind what it has read, token by token."""

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
        model: a `TokenBackbone` in evaluation.
        state: the state of what was read; `TokenBackbone.preallocate` has given it room for the tokens to come.
        logits: `[B, vocab_size]`, the scores of the token that follows.
        sampler: draws from the scores.
        cuda_graph: record the step and the sampler as one `StepGraph`, and replay it.

    Attributes:
        state, logits: after all drawn tokens but the last, and after `read` after all.

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
        self.model, self.state, self.logits, self.sampler = model, state, logits, sampler
        self.cuda_graph = cuda_graph
        self._graph: StepGraph | None = None
        self._token: Tensor | None = None

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
        """Read the token that was drawn last. After it, `state` and `logits` are those of the whole text."""
        assert self._token is not None, "nothing was drawn"
        if self.cuda_graph:
            self._replay(self._token)
        else:
            self.logits, self.state = self.model.step(self._token, self.state)

    def _replay(self, token: Tensor) -> Tensor:
        if self._graph is None:
            self._graph = StepGraph(self.model, self.state, self.sampler)
            self.state, self.logits = self._graph.state, self._graph.logits
            self._graph.token.copy_(token)
        self._graph.replay()
        return self._graph.token
