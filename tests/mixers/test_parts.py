"""A short convolution and an output gate for mixers that have none."""

import pytest
import torch
from torch.nn import functional

from longseq import mixers
from longseq.backbones.image import ImageBackbone
from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.registry import create

BOTH = {"convolution_width": 4, "output_gate": True}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "added"), [("attention", BOTH), ("rwkv7", BOTH), ("lattice", {"output_gate": True})])
def test_the_laws_hold(name, added):
    mixers.check(name, **added)


def test_the_formula():
    mixer = create("linear_attention", 16, **BOTH).double()
    plain = create("linear_attention", 16).double()
    plain.load_state_dict(mixer.state_dict(), strict=False)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    taps = mixer.added_convolution.weight
    ahead = functional.pad(plain.in_proj(x).mT, (taps.shape[1] - 1, 0))
    u = functional.conv1d(ahead, taps.unsqueeze(1), groups=len(taps)).mT
    expected = plain.out_proj(plain.scan(u)[0] * mixer.added_gate(x).sigmoid())
    torch.testing.assert_close(mixer(x)[0], expected)


def test_options_of_every_mixer():
    for name in mixers.mixer_names():
        assert {*BOTH} <= {*mixers.options(name)}
        assert type(create(name, 16)) is mixers.get(name)  # published defaults stay
    assert type(create("gated_deltanet", 16, convolution_width=0, output_gate=False)) is mixers.get("gated_deltanet")
    with pytest.raises(ValueError, match="no option"):
        create("attention", 16, gate=True)


@pytest.mark.parametrize("share", ["projections", "none"])
def test_images_read_both_ways(share):
    options = {"mixer": "longhorn", "mixer_options": {"output_gate": True}, "share_directions": share}
    model = ImageBackbone(img_size=32, patch_size=8, embed_dim=32, depth=2, num_classes=3, **options)
    assert model.arguments["mixer_options"]["output_gate"] is True
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "added_gate" in name)


def test_a_language_model_continues_its_state():
    model = TokenBackbone(vocab_size=11, d_model=16, depth=2, mixer="attention", mixer_options=BOTH).eval()
    tokens = torch.randint(11, (1, 8))
    whole, _ = model(tokens)
    first, state = model(tokens[:, :5])
    torch.testing.assert_close(torch.cat([first, model(tokens[:, 5:], state)[0]], 1), whole)


def test_attention_to_all_tokens_takes_no_convolution():
    with pytest.raises(ValueError, match="causal"):
        create("attention", 16, causal=False, convolution_width=4)
