"""The fused choice of tokens draws the same tokens as float64, and a kernel that draws others is refused."""

import importlib

import pytest
import torch

from longseq.kernels import explain
from longseq.kernels.token_choice import fused

triton_choice = importlib.import_module("longseq.kernels.token_choice.triton_choice")

KINDS = (*fused.KINDS, "drawn top_k top_p")


@pytest.fixture
def short_blocks(interpreted, monkeypatch):
    """A row is read in several blocks, as it is with the vocabulary of a language model."""
    monkeypatch.setattr(triton_choice, "BLOCK", 64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_draws_the_tokens_of_float64(kind, short_blocks):
    dtype = torch.bfloat16 if "seen" in kind else torch.float32
    assert fused.compare(torch.device("cpu"), dtype, kind, rows=12, columns=301) is None


@pytest.mark.parametrize("name", ["sort_scores", "penalize", "INCREMENT"])
def test_a_kernel_that_draws_wrong_tokens_does_not_pass_its_check(name, short_blocks, monkeypatch):
    wrong = {
        "sort_scores": lambda scores, top_k, top_p: (scores, torch.arange(scores.shape[-1]).repeat(len(scores), 1)),
        "penalize": lambda scores, seen, penalty: scores.float(),
        "INCREMENT": 1,
    }
    monkeypatch.setattr(triton_choice, name, wrong[name])
    assert fused.compare(torch.device("cpu"), torch.float32, "drawn top_p seen", rows=12, columns=301) is not None


def test_only_tokens_that_have_probability_are_drawn_across_blocks(short_blocks):
    scores = torch.full((1, 200), -torch.inf)
    scores[0, [3, 70, 150]] = 0.0
    found = set()
    for seed in range(40):
        counter, valid = torch.tensor([seed]), torch.ones(1, dtype=torch.bool)
        how = {"temperature": 1.0, "top_k": None, "top_p": None, "repetition_penalty": 1.0}
        found.add(int(triton_choice.token_choice_triton(scores, counter, valid, None, **how)))
        assert bool(valid)
    assert found == {3, 70, 150}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_draws_the_tokens_of_float64_on_a_gpu(kind, dtype):
    for rows, columns in ((64, 50_257), (3, 151_936), (5, 256)):
        assert fused.compare(torch.device("cuda"), dtype, kind, rows=rows, columns=columns) is None
    assert fused.find_error(torch.cuda.current_device(), dtype, kind) is None
    assert explain("token_choice", device="cuda", dtype=dtype)["fused"] == []
