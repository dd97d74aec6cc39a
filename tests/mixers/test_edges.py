"""Every mixer at the edges: no rows, no tokens, padding of any value, and states of another number of rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import cases
from torch import Tensor

from longseq import mixers
from longseq.blocks.reading import reading_orders
from longseq.mixers.contract import assert_same_state
from longseq.mixers.directions import Directions
from longseq.state import map_state

NAMES = mixers.mixer_names()
D_MODEL = 32


@pytest.mark.parametrize("name", NAMES)
@cases(("rows", "tokens"), [(2, 0), (0, 5), (0, 0)])
def test_no_rows_and_no_tokens(name: str, rows: int, tokens: int) -> None:
    mixer = mixers.create(name, D_MODEL)
    _, given = mixer(torch.randn(rows, 3, D_MODEL))
    given = map_state(Tensor.detach, given)
    x = torch.randn(rows, tokens, D_MODEL, requires_grad=True)
    y, state = mixer(x, given)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    if tokens == 0:
        assert_same_state(state, given)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_without_tokens(name: str) -> None:
    mixer = mixers.create(name, D_MODEL)
    _, given = mixer(torch.randn(2, 3, D_MODEL))
    y, state = mixer(torch.randn(1, 0, D_MODEL), given, cu_seqlens=torch.tensor([0, 0, 0]))
    assert y.shape == (1, 0, D_MODEL)
    assert_same_state(state, given)


@pytest.mark.parametrize("name", NAMES)
def test_all_parameters_have_a_gradient_without_tokens(name: str) -> None:
    """In distributed training, ranks wait for the gradient of every parameter."""
    mixer = mixers.create(name, D_MODEL)
    packed, mask = {"cu_seqlens": torch.tensor([0, 0])}, {"mask": torch.ones(1, 0, dtype=torch.bool)}
    for options in ({}, mask, packed, packed | {"state": mixer.initial_state(1)}):
        x = torch.randn(1, 0, D_MODEL, requires_grad=True)
        mixer.zero_grad()
        mixer(x, **options)[0].sum().backward()
        assert not [key for key, leaf in (*mixer.named_parameters(), ("x", x)) if leaf.grad is None], options.keys()


@pytest.mark.parametrize("name", NAMES)
@cases("value", [float("nan"), 1e30])
def test_nothing_of_the_padding_is_read(name: str, value: float) -> None:
    mixer = mixers.create(name, D_MODEL)
    for real in (
        torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool(),
        torch.tensor([[0, 1, 0, 1, 1, 1]]).bool(),
    ):
        x = torch.randn(*real.shape, D_MODEL)
        expected, expected_state = mixer(x, mask=real)
        y, state = mixer(x.masked_fill(~real.unsqueeze(-1), value), mask=real)
        assert torch.equal(y[real], expected[real])
        assert_same_state(state, expected_state)


@pytest.mark.parametrize("share", ["projections", "none"])
@pytest.mark.parametrize("name", ["deltanet", "mamba2", "rwkv6"])
def test_nothing_of_the_padding_is_read_in_both_directions(name: str, share: str) -> None:
    layer = Directions(partial(mixers.create, name, D_MODEL), reading_orders("bidirectional"), share=share)
    real = torch.tensor([[0, 1, 1, 1, 0]]).bool()
    x = torch.randn(1, 5, D_MODEL)
    y, _ = layer(x.masked_fill(~real.unsqueeze(-1), float("nan")), mask=real)
    assert torch.equal(y[real], layer(x, mask=real)[0][real])


@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_other_rows_is_refused(name: str) -> None:
    mixer = mixers.create(name, D_MODEL)
    _, state = mixer(torch.randn(2, 3, D_MODEL))
    with pytest.raises(ValueError, match="the state is one of 2 sequences, and 3 are read"):
        mixer(torch.randn(3, 3, D_MODEL), state)
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"the state is one of 2 sequences, and {rows} are read"):
            mixer.step(torch.randn(rows, D_MODEL), state)
    with pytest.raises(ValueError, match="the state is one of 1 sequences, and 2 are read"):
        mixer.step(torch.randn(2, D_MODEL), mixer.initial_state(1))
