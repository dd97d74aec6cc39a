"""Lattice and TTT: their options and slots, and the effect of TTT's chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq import mixers
from longseq.backbones.classifier import TextClassifier

D_MODEL, TOKENS = 32, 24


def make(name: str = "lattice", **options: Any) -> mixers.Mixer:
    torch.manual_seed(0)
    return mixers.create(name, D_MODEL, **options).double().eval()


def make_tokens(tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(2, tokens, D_MODEL, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", ["lattice", "ttt"])
def test_the_first_slots_are_orthonormal_and_belong_to_the_checkpoint(name: str) -> None:
    mixer, other = make(name), make(name)
    other.reset_parameters()
    memory = mixer.initial_state(2, dtype=torch.float64).memory
    gram = memory.mT @ memory
    torch.testing.assert_close(gram, torch.eye(32).double().expand(gram.shape), rtol=0, atol=1e-5)
    assert not torch.equal(other.initial_state(2, dtype=torch.float64).memory, memory)
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(other.initial_state(2, dtype=torch.float64).memory, memory)
    assert not any(name == "slots" for name, _ in mixer.named_parameters())


@pytest.mark.parametrize("normalize_key", [False, True])
def test_gradients_through_a_hundred_equal_tokens_explode_unless_keys_are_normalised(normalize_key: bool) -> None:
    mixer = make(normalize_key=normalize_key)
    x = make_tokens(1).expand(-1, 96, -1).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mixer(x)[0][:, -1].sum(), x)
    assert gradient.norm() < 100 if normalize_key else gradient.norm() > 1e4


def test_chunks_are_another_function_that_may_be_cut_at_their_borders() -> None:
    mixer, x = make("ttt", chunk_size=4), make_tokens()
    whole, _ = mixer(x)
    assert (whole - make("ttt")(x)[0]).norm() > 1e-3 * whole.norm()
    first, state = mixer(x[:, :8])
    second, _ = mixer(x[:, 8:], state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("place", ["in front", "between", "behind"])
def test_padding_moves_no_borders_of_chunks(place: str, reverse: bool) -> None:
    mixer, x = make("ttt", chunk_size=4), make_tokens()
    real = torch.ones(TOKENS, dtype=torch.bool)
    real[{"in front": slice(6), "between": slice(9, 16), "behind": slice(19, None)}[place]] = False
    expected, state = mixer(x[:1, real], reverse=reverse)
    actual, padded = mixer(x, mask=torch.stack([real, torch.ones_like(real)]), reverse=reverse)
    torch.testing.assert_close(actual[:1, real], expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(actual[1:], mixer(x[1:], reverse=reverse)[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(padded.memory[:1], state.memory, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("share", ["projections", "none"])
def test_a_classifier_of_chunks_scores_padded_documents_as_if_alone(share: str) -> None:
    torch.manual_seed(0)
    model = TextClassifier(
        num_classes=3, vocab_size=30, d_model=D_MODEL, depth=2, mixer="ttt", mixer_options={"chunk_size": 16},
        direction="bidirectional", share_directions=share,
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3 if parameter.ndim > 1 else 1  # that chunks differ from the exact form
    tokens = torch.randint(0, 30, (2, 60))
    mask = torch.arange(60) < torch.tensor([[37], [60]])
    alone = torch.cat([model(tokens[:1, :37]), model(tokens[1:])])
    torch.testing.assert_close(model(tokens, mask=mask), alone, rtol=1e-9, atol=1e-10)
