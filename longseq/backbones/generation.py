"""Text from a language model, token by token, and steps as a CUDA graph."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longseq.backbones.sampling import TokenSampler
from longseq.blocks.residual import ChannelMixingState
from longseq.kernels.devices import side_stream
from longseq.mixers import Mixer
from longseq.mixers.attention import KeyValueCache
from longseq.state import map_state, state_tensors

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
        """Read the token that was drawn last: `state` and `logits` then include it."""
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


class StepGraph:
    """The step of a token model recorded as a CUDA graph: it reads one token and updates the state in place.

    A step is a few hundred short kernels, which take the host longer to launch than the GPU to run. A replay is one
    launch.

    Args:
        model: a `TokenBackbone` in evaluation mode on a CUDA device.
        state: the state to start from. Preallocated keys and values become the graph's own; everything else is copied.
        sampler: draws the next token, in the same graph; None: the caller chooses it.

    Attributes:
        token: `[B]`, the token that the next replay reads; with a sampler, each replay writes the next one.
        logits: `[B, vocab_size]`, the scores after the last replay.
        state: the state after the last replay.
        room: the number of tokens that the state has room for; None: any.

    Raises:
        ValueError: a mixer's state grows with every token (attention needs `TokenBackbone.preallocate`), or there is no
            room for another token.
    """

    def __init__(self, model: TokenBackbone, state: TokenState, sampler: TokenSampler | None = None) -> None:
        _check_preallocated(model, state)
        self.state = state._replace(
            layers=tuple(_own(layer) for layer in state.layers), position=map_state(torch.clone, state.position)
        )
        self.room = model.room(self.state)
        self._check_room()
        rows = next(tensor.shape[0] for _, tensor in state_tensors(self.state))
        self.model, self.sampler = model, sampler
        self.token = torch.zeros(rows, dtype=torch.long, device=next(model.parameters()).device)
        self.logits: Tensor
        self._record()

    def _record(self) -> None:
        device = self.token.device
        # A graph would read autocast's cache of weights after autocast has freed it.
        casts = torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False)
        with torch.no_grad(), casts, torch.cuda.device(device):
            side = side_stream(torch.cuda.current_device())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # The first calls compile and choose kernels, which cannot be recorded. They write into preallocated
                # keys and values at the place of the next token only.
                rehearsing = copy.deepcopy(self.sampler)
                for _ in range(3):
                    logits, _ = self.model.step(self.token, self.state)
                    if rehearsing is not None:
                        rehearsing(logits)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=side):
                    self._advance()
            torch.cuda.current_stream().wait_stream(side)

    def _advance(self) -> None:
        """What a replay runs."""
        self.logits, following = self.model.step(self.token, self.state)
        for (_, kept), (_, new) in zip(state_tensors(self.state), state_tensors(following), strict=True):
            if kept is not new:  # written in place
                kept.copy_(new)
        if self.sampler is not None:
            self.token.copy_(self.sampler(self.logits))

    def __call__(self, token: Tensor) -> Tensor:
        """Read one more token `[B]`; returns logits `[B, vocab_size]`, which the next call overwrites."""
        self.token.copy_(token)
        self.replay()
        return self.logits

    def replay(self) -> None:
        """Read `token`, and update `logits`, `state` and, with a sampler, `token`."""
        self._check_room()
        if self.room is not None:
            self.room -= 1
        self.graph.replay()

    def _check_room(self) -> None:
        if self.room is not None and self.room < 1:
            raise ValueError("the state has no room for another token: preallocate more")


def _own(layer: Any) -> Any:
    if isinstance(layer, ChannelMixingState):
        return ChannelMixingState(_own(layer.mixer), layer.shift.clone())
    if isinstance(layer, KeyValueCache):
        return layer._replace(length=layer.length.clone())
    return map_state(torch.clone, layer)


def _check_preallocated(model: TokenBackbone, state: TokenState) -> None:
    for block, layer in zip(model.blocks, state.layers, strict=True):
        if block.mixer.growing_state and not isinstance(block.mixer_state(layer), KeyValueCache):
            raise ValueError(f"a CUDA graph has fixed shapes: {type(block.mixer).__name__} grows with every token")


def can_record(model: nn.Module) -> bool:
    """Whether a CUDA graph can record the steps of a model."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    return on_gpu and bool(mixers) and all(mixer.preallocates or not mixer.growing_state for mixer in mixers)
