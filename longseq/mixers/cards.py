"""Descriptions of the mixers: papers, sizes of states, parameters and operations of one layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longseq.kernels import explain
from longseq.mixers.base import Mixer
from longseq.mixers.registry import create, mixer_names
from longseq.parameters import count_parameters
from longseq.state import state_size


@dataclass(frozen=True)
class MixerCard:
    """A mixer with the options of its paper.

    Attributes:
        state_size: numbers in the initial state of one sequence.
        state_growth: numbers that each token adds to the state; 0 if the size does not depend on the length.
        parameters: the number of parameters of one layer.
        flops_per_token: operations of one layer, forward, averaged over a sequence; a multiply-add counts as two.
        backends: the kernel operations of the layer, each with its backends, the preferred one first. Empty for mixers
            that use torch's operations only.
    """

    name: str
    paper: str
    state_size: int
    state_growth: int
    parameters: int
    flops_per_token: int
    backends: Mapping[str, tuple[str, ...]]


def list_mixers(d_model: int = 256, tokens: int = 1024) -> tuple[MixerCard, ...]:
    """Describe one layer of every mixer, by name; FLOPs are averaged over a sequence of `tokens` tokens."""
    # The meta device initialises no weights: this takes no memory and leaves the caller's random state unchanged.
    with torch.device("meta"), torch.no_grad():
        return tuple(_card(name, create(name, d_model), tokens) for name in mixer_names())


def _card(name: str, mixer: Mixer, tokens: int) -> MixerCard:
    return MixerCard(
        name=name,
        paper=mixer.paper,
        state_size=state_size(mixer.initial_state(1)),
        state_growth=find_growth(mixer),
        parameters=count_parameters(mixer),
        flops_per_token=mixer.flops(tokens) // tokens,
        backends={op: tuple(explain(op)) for op in mixer.operations},
    )


def find_growth(mixer: Mixer) -> int:
    """The numbers that each token adds to the state of one sequence; the mixer is on the meta device."""
    if not mixer.growing_state:
        return 0
    one, two = (mixer(torch.empty(1, tokens, mixer.d_model, device="meta"))[1] for tokens in (1, 2))
    return state_size(two) - state_size(one)
