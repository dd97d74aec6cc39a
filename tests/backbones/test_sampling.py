"""The choice of tokens: what is kept, what a row depends on, and that nothing waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longseq.backbones.sampling import Sampling, TokenSampler, choose_tokens, penalize, random_places

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9},
    {"top_k": 12, "top_p": 0.8, "repetition_penalty": 1.5},
]


def make_scores(rows: int, step: int = 0, vocabulary: int = 40) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(step))


def draw(sampler: TokenSampler, scores: list[Tensor]) -> list[list[int]]:
    return [sampler(one).tolist() for one in scores]


def test_shares_of_drawn_tokens_are_those_of_the_scores():
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)).expand(10_000, 4)
    places = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000

    def shares(**options):
        return choose_tokens(scores, places, **options).bincount(minlength=4) / 10_000

    torch.testing.assert_close(shares(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=2e-4, rtol=0)
    torch.testing.assert_close(shares(top_k=2), torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=2e-4, rtol=0)
    torch.testing.assert_close(shares(top_p=0.79), torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=2e-4, rtol=0)
    torch.testing.assert_close(shares(top_p=0.01), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    squares = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(shares(temperature=0.5), squares / squares.sum(), atol=2e-4, rtol=0)
    assert shares(temperature=0.0)[0] == 1


def test_the_penalty_makes_seen_tokens_less_probable():
    scores = torch.tensor([[2.0, 1.5, -1.0, -1.2]])
    seen = torch.tensor([[True, False, True, False]])
    assert penalize(scores, seen, 2.0).tolist() == [[1.0, 1.5, -2.0, torch.tensor(-1.2).item()]]
    sampler = TokenSampler(Sampling(temperature=0.0, repetition_penalty=2.0), torch.arange(1), seen=seen)
    assert draw(sampler, [scores, scores]) == [[1], [0]], "a drawn token is seen from then on"


def test_places_are_those_of_splitmix64() -> None:
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)  # the first numbers of seed 1234567
    increment = 0x9E3779B97F4A7C15 - 2**64
    counters = 1234567 + torch.arange(1, 4) * increment
    assert random_places(counters).tolist() == [(number >> 40) / 2**24 for number in published]


def test_draws_of_a_row_are_spread_evenly_and_without_memory() -> None:
    rows, draws = 2000, 30
    sampler = TokenSampler(Sampling(), torch.arange(rows))
    tokens = torch.stack([sampler(torch.zeros(rows, 4)) for _ in range(draws)], dim=1)
    shares = tokens.flatten().bincount(minlength=4) / tokens.numel()
    torch.testing.assert_close(shares, torch.full((4,), 0.25), atol=0.01, rtol=0)
    pairs = (4 * tokens[:, :-1] + tokens[:, 1:]).flatten().bincount(minlength=16) / (rows * (draws - 1))
    torch.testing.assert_close(pairs, torch.full((16,), 1 / 16), atol=0.005, rtol=0)
    neighbours = (tokens[1:] == tokens[:-1]).float().mean()  # seeds that follow each other
    assert abs(neighbours - 0.25) < 0.01


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_is_drawn_as_if_alone_and_goes_on_after_an_interruption(options: dict[str, Any]) -> None:
    sampling, seeds = Sampling(**options), torch.tensor([3, 2**63 - 1, 0])
    scores = [make_scores(3, step) for step in range(6)]

    def seen(rows: int) -> Tensor:
        return torch.zeros(rows, 40, dtype=torch.bool)

    together = draw(TokenSampler(sampling, seeds, seen=seen(3)), scores)
    for row in range(3):
        own = [one[row : row + 1] for one in scores]
        sampler = TokenSampler(sampling, seeds[row : row + 1], seen=seen(1))
        assert draw(sampler, own[:4]) == [[tokens[row]] for tokens in together[:4]]
        again = TokenSampler(sampling, seeds[row : row + 1], drawn=4, seen=sampler.seen)
        assert draw(again, own[4:]) == [[tokens[row]] for tokens in together[4:]]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shapes_do_not_depend_on_values_and_nothing_is_read_back(options: dict[str, Any]) -> None:
    """A CUDA graph can record neither; tensors on the meta device have no values that could be read."""
    with torch.device("meta"):
        seen = torch.zeros(2, 40, dtype=torch.bool)
        sampler = TokenSampler(Sampling(**options), torch.zeros(2, dtype=torch.long), seen=seen)
        assert sampler(torch.zeros(2, 40, dtype=torch.bfloat16)).shape == (2,)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_token_without_probability_is_never_drawn(options: dict[str, Any]) -> None:
    few, many = torch.full((3, 40), -torch.inf), torch.full((3, 1300), -torch.inf)
    few[:, [7, 20]] = many[:, [7, 1290]] = torch.tensor([1.0, 0.5])
    edges = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    options = {name: value for name, value in options.items() if name != "repetition_penalty"}
    for places in (edges, torch.ones(3)):  # 1 is behind all
        assert set(choose_tokens(few, places, **options).tolist()) <= {7, 20}
        assert set(choose_tokens(many, places, **options).tolist()) <= {7, 1290}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_are_an_error(options: dict[str, Any], wrong: float) -> None:
    sampler = TokenSampler(Sampling(**options), torch.arange(2))
    sampler(make_scores(2))
    sampler.check()
    scores = make_scores(2)
    scores[1] = wrong
    assert 0 <= int(sampler(scores)[1]) < 40, "the model can read it"
    sampler(make_scores(2))
    with pytest.raises(ValueError, match="scores are not finite"):
        sampler.check()


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_graph_draws_what_is_drawn_without_it(options: dict[str, Any]) -> None:
    sampling, seeds = Sampling(**options), torch.arange(64, device="cuda")
    every = [make_scores(64, step, 50_257).cuda() for step in range(20)]

    def make() -> TokenSampler:
        return TokenSampler(sampling, seeds, seen=torch.zeros(64, 50_257, dtype=torch.bool, device="cuda"))

    make()(every[0])
    sampler, scores, graph = make(), every[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = sampler(scores)
    replayed = []
    for one in every:
        scores.copy_(one)
        graph.replay()
        replayed.append(token.tolist())
    assert replayed == draw(make(), every)
    alone = TokenSampler(sampling, seeds[:1], seen=torch.zeros(1, 50_257, dtype=torch.bool, device="cuda"))
    assert [tokens[:1] for tokens in replayed] == draw(alone, [one[:1] for one in every])
    on_cpu = TokenSampler(sampling, seeds.cpu(), seen=torch.zeros(64, 50_257, dtype=torch.bool))
    same = sum(a == b for gpu, cpu in zip(replayed, draw(on_cpu, [one.cpu() for one in every]), strict=True)
               for a, b in zip(gpu, cpu, strict=True))  # fmt: skip
    assert same >= 0.97 * 64 * 20, "sums are rounded in another order"
