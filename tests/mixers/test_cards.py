"""The statements of the mixers' cards are true."""

from __future__ import annotations

import pytest
import torch

from longseq import mixers
from longseq.kernels import explain
from longseq.state import state_size

WIDTH = 64
CARDS = {card.name: card for card in mixers.list_mixers(WIDTH, tokens=32)}


@pytest.mark.parametrize("name", mixers.mixer_names())
def test_a_card_tells_what_a_layer_costs(name: str) -> None:
    card, mixer = CARDS[name], mixers.create(name, WIDTH)
    assert card.paper == mixer.paper
    assert card.parameters == sum(parameter.numel() for parameter in mixer.parameters())
    assert card.flops_per_token * 32 == pytest.approx(mixer.flops(32), abs=32)
    assert card.backends == {op: tuple(explain(op)) for op in mixer.operations}
    for tokens in (1, 5):
        _, state = mixer(torch.randn(1, tokens, WIDTH))
        assert card.state_size + tokens * card.state_growth == state_size(state)
