"""The loss by chunks of tokens is that of all scores at once, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from longseq.backbones import vocabulary_loss
from longseq.backbones.tokens import TokenBackbone
from longseq.backbones.vocabulary_loss import IGNORED, summed_loss

V, D = 11, 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vocabulary_loss, "CHUNK_SCORES", 3 * V)  # three tokens


def problem(dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    features = torch.randn(2, 5, D, generator=random, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, generator=random, dtype=dtype, requires_grad=True)
    target = torch.randint(V, (2, 5), generator=random)
    target[0, 1:4] = IGNORED
    return features, weight, target


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_sum_and_gradients_are_those_of_all_scores(z_loss):
    features, weight, target = problem()
    scores = functional.linear(features, weight)
    loss = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    whole = loss + z_loss * scores.logsumexp(-1)[target != IGNORED].square().sum()
    wanted = torch.autograd.grad(3 * whole, (features, weight))
    summed = summed_loss(features, weight, target, z_loss=z_loss)
    torch.testing.assert_close(summed.objective, whole)
    torch.testing.assert_close(summed.loss, loss)
    assert not summed.loss.requires_grad
    torch.testing.assert_close(torch.autograd.grad(3 * summed.objective, (features, weight)), wanted)


def test_gradients_serve_one_backward_pass():
    features, weight, target = problem()
    objective = summed_loss(features, weight, target).objective
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        objective.backward()


def test_a_batch_without_a_target_adds_nothing():
    features, weight, _ = problem()
    summed = summed_loss(features, weight, torch.full((2, 5), IGNORED), z_loss=0.1)
    assert summed.objective == 0
    assert all(torch.all(g == 0) for g in torch.autograd.grad(summed.objective, (features, weight)))


def test_the_gradient_of_a_weight_in_half_precision_is_summed_in_float32():
    features, weight, target = problem(torch.bfloat16)
    (found,) = torch.autograd.grad(summed_loss(features, weight, target).objective, weight)
    wide = [tensor.detach().float().requires_grad_() for tensor in (features, weight)]
    (wanted,) = torch.autograd.grad(summed_loss(*wide, target).objective, wide[1])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_sums_what_its_scores_say(tied):
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=V, d_model=D, depth=1, mixer="linear_attention", tie_embeddings=tied).double()
    tokens = torch.arange(14).view(2, 7) % V
    target = (tokens + 1) % V
    whole = functional.cross_entropy(model(tokens)[0].flatten(0, 1), target.flatten(), reduction="none")
    wanted = torch.autograd.grad(whole.sum(), list(model.parameters()))
    features, _ = model.forward_features(tokens)
    torch.testing.assert_close(model.token_losses(features, target).flatten(), whole.detach())
    found = torch.autograd.grad(model.summed_loss(features, target).objective, list(model.parameters()))
    torch.testing.assert_close(found, wanted)


def test_a_head_with_an_adapter_is_called():
    model = TokenBackbone(vocab_size=V, d_model=D, depth=1, mixer="linear_attention", tie_embeddings=False)
    features, target = torch.randn(3, D), torch.tensor([1, 2, IGNORED])
    before = model.summed_loss(features, target).loss
    model.head = nn.Sequential(model.head, nn.Linear(V, V))
    after = model.summed_loss(features, target, z_loss=0.1)
    assert after.loss != before
    torch.testing.assert_close(after.loss, model.token_losses(features, target).sum())
    assert after.objective > after.loss
