"""Tokens drawn with and without a CUDA graph; on a CPU, what the graph would record runs in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq.backbones.generation import Continuation, StepGraph
from longseq.backbones.sampling import Sampling, TokenSampler
from longseq.backbones.tokens import TokenBackbone
from longseq.state import state_tensors

MIXERS = ["deltanet", "attention", "deltanet+window_attention+attention", "vla"]
OPTIONS = {"window_attention": {"window": 5, "num_heads": 4, "num_kv_heads": 2}}


def make(mixer: str) -> tuple[TokenBackbone, Tensor]:
    torch.manual_seed(0)
    options = OPTIONS if "window" in mixer else None
    model = TokenBackbone(
        vocab_size=11, d_model=32, depth=3, mixer=mixer, mixer_options=options, positions="learned", max_length=40
    )
    return model.eval(), torch.randint(11, (3, 9))


def begin(model: TokenBackbone, prompt: Tensor, *, cuda_graph: bool, room: int = 20, **options: Any) -> Continuation:
    features, state = model.forward_features(prompt, max_length=prompt.shape[1] + room)
    assert state is not None
    seen = torch.zeros(3, 11, dtype=torch.bool, device=prompt.device)
    sampler = TokenSampler(Sampling(**options), torch.arange(3, device=prompt.device), seen=seen)
    return Continuation(model, state, model.forward_head(features[:, -1]), sampler, cuda_graph=cuda_graph)


def check_that_graphs_change_nothing(mixer: str, device: str) -> None:
    model, prompt = make(mixer)
    model, prompt = model.to(device), prompt.to(device)
    for options in ({"temperature": 20.0}, {"temperature": 30.0, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.2}):
        plain, graph = (begin(model, prompt, cuda_graph=cuda_graph, **options) for cuda_graph in (False, True))
        tokens = torch.stack([plain.draw() for _ in range(12)], dim=1)
        assert torch.equal(torch.stack([graph.draw() for _ in range(12)], dim=1), tokens)
        assert len(tokens.unique()) > 4
        plain.read()
        graph.read()
        whole = model(torch.cat([prompt, tokens], dim=1))[0][:, -1]
        for one in (plain, graph):
            assert (one.logits - whole).norm() <= (1e-4 if device == "cpu" else 2e-2) * whole.norm()
        for (name, one), (_, other) in zip(state_tensors(plain.state), state_tensors(graph.state), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
def test_what_a_graph_records_draws_the_same_tokens(mixer: str, graphs_on_cpu: None) -> None:
    check_that_graphs_change_nothing(mixer, "cpu")


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_graph_draws_the_same_tokens(mixer: str) -> None:
    check_that_graphs_change_nothing(mixer, "cuda")


@torch.no_grad()
def test_a_graph_takes_no_more_tokens_than_there_is_room_for(graphs_on_cpu: None) -> None:
    model, prompt = make("attention")
    writing = begin(model, prompt, cuda_graph=True, room=3)
    for _ in range(4):  # the last one is drawn and not read
        writing.draw()
    with pytest.raises(ValueError, match="no room for another token"):
        writing.read()
    with pytest.raises(ValueError, match="Attention grows with every token"):
        StepGraph(model, model(prompt)[1])
