"""The channel mixing of RWKV: its formula, and language models whose blocks carry its last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.channel_mixing import ChannelMixing, ChannelMixing7
from longseq.blocks.residual import ChannelMixingState
from longseq.state import state_tensors

WIDTH, TOKENS, VOCABULARY = 8, 13, 17


def make_model(mixer: str = "rwkv4", **options: Any) -> TokenBackbone:
    torch.manual_seed(0)
    mlp = "rwkv7" if "rwkv7" in mixer else "rwkv"
    model = TokenBackbone(vocab_size=VOCABULARY, d_model=WIDTH, mixer=mixer, mlp=mlp, **options).double().eval()
    with torch.no_grad():
        for block in model.blocks:
            nn.init.uniform_(block.mlp.mix)
    return model


def make_tokens(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def naive(mixing: ChannelMixing, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other; also the last token."""
    outputs = []
    for token in x.unbind(1):
        if mixing.receptance is None:  # RWKV-7
            key, gate = (1 - mixing.mix[0]) * token + mixing.mix[0] * previous, torch.ones(())
        else:
            key, receptance = (amount * token + (1 - amount) * previous for amount in mixing.mix)
            gate = 1 / (1 + (-(receptance @ mixing.receptance.weight.T)).exp())
        outputs.append((key @ mixing.fc1.weight.T).clamp_min(0) ** 2 @ mixing.fc2.weight.T * gate)
        previous = token
    return torch.stack(outputs, 1), previous


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [ChannelMixing, ChannelMixing7])
def test_it_is_the_published_layer_with_all_gradients(
    kind: type[ChannelMixing], carried: bool, recompute: bool
) -> None:
    torch.manual_seed(0)
    mixing = kind(WIDTH, 24, recompute=recompute).double()
    nn.init.uniform_(mixing.mix)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, WIDTH, 1, dtype=torch.float64, requires_grad=True) if carried else None
    y, state = mixing(x, start)
    expected, last = naive(mixing, x, x.new_zeros(2, WIDTH) if start is None else start.squeeze(-1))
    torch.testing.assert_close(y, expected)
    assert state is not None
    torch.testing.assert_close(state, last.unsqueeze(-1))
    wanted = (x, *mixing.parameters(), *(() if start is None else (start,)))
    results = [torch.autograd.grad(out.sin().sum() + end.sum(), wanted) for out, end in ((y, state), (expected, last))]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("mixer", ["rwkv4", "rwkv6+attention", "rwkv7"])
def test_steps_and_parts_are_the_whole(mixer: str, norm_order: str) -> None:
    model, tokens = make_model(mixer, norm_order=norm_order), make_tokens()
    expected, final = model(tokens)
    first, state = model(tokens[:, :4])
    second, state = model(tokens[:, 4:9], state)
    parts = [*first.unbind(1), *second.unbind(1)]
    state = model.preallocate(state, TOKENS)
    for token in tokens[:, 9:].unbind(1):
        logits, state = model.step(token, state)
        parts.append(logits)
    torch.testing.assert_close(torch.stack(parts, 1), expected)
    assert all(isinstance(layer, ChannelMixingState) for layer in state.layers)
    assert model.room(state) == (0 if "attention" in mixer else None)
    pairs = zip(state_tensors(model.trim(state)), state_tensors(final), strict=True)
    for (name, own), (_, wanted) in pairs:
        torch.testing.assert_close(own, wanted, msg=name)
    from_initial, _ = model(tokens, model.initial_state(2, dtype=torch.float64))
    torch.testing.assert_close(from_initial, expected)


@pytest.mark.parametrize("mixer", ["rwkv4", "rwkv7"])
def test_packed_and_padded_documents_are_single_ones(mixer: str) -> None:
    model, tokens = make_model(mixer), make_tokens()
    one, other = tokens[:1, :5], tokens[1:]
    borders = torch.tensor([0, 5, 5 + TOKENS])
    expected, states = zip(*(model(document) for document in (one, other)), strict=True)
    y, state = model(torch.cat([one, other], 1), cu_seqlens=borders)
    torch.testing.assert_close(y, torch.cat(expected, 1))
    for index, layer in enumerate(state.layers):
        torch.testing.assert_close(layer.shift, torch.cat([each.layers[index].shift for each in states]))
    # Padding before the first document and behind the second one.
    rows = torch.zeros(2, TOKENS + 2, dtype=torch.long)
    rows[0, -5:], rows[1, :TOKENS] = one, other
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[0, -5:], mask[1, :TOKENS] = True, True
    padded, state = model(rows, mask=mask)
    torch.testing.assert_close(padded[mask], y[0])
    torch.testing.assert_close(state.layers[0].shift, torch.cat([each.layers[0].shift for each in states]))
    # A changed document changes no other one, nor its gradient.
    embedded = model.embedding.weight
    changed, _ = model(torch.cat([(one + 1) % VOCABULARY, other], 1), cu_seqlens=borders)
    torch.testing.assert_close(changed[:, 5:], expected[1])
    (alone,), (packed,) = (torch.autograd.grad(part.square().sum(), embedded) for part in (expected[1], changed[:, 5:]))
    torch.testing.assert_close(packed, alone)


def test_rwkv7_starts_with_the_published_shares_of_the_token_before() -> None:
    model = TokenBackbone(vocab_size=VOCABULARY, d_model=4, depth=2, mixer="rwkv7", mlp="rwkv7")
    places = torch.tensor([0, 0.25, 0.5, 0.75])
    for block, exponent in zip(model.blocks, (1, 0.5**4), strict=True):
        torch.testing.assert_close(block.mlp.mix, 1 - places[None] ** exponent)
        assert block.mlp.fc1.out_features == 64, "4 D, up to a multiple of 64"
