"""The values of RWKV-7's first layer reach its later layers: in every reading and direction, in whole and in parts."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from cases import cases
from torch import Tensor

from longseq import mixers
from longseq.backbones.image import ImageBackbone
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.positions import Layout
from longseq.blocks.reading import reorder, restore
from longseq.blocks.recompute import RECOMPUTE
from longseq.mixers.directions import SHARING, Directions
from longseq.models import PretrainedModel

WIDTH, LAYOUT = 8, Layout(3, 4, 2)
PATTERN = "rwkv7+deltanet+2xrwkv7"


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def language_model(**options: Any) -> TokenBackbone:
    made = TokenBackbone(**{"vocab_size": 11, "d_model": 16, "depth": 4, "mixer": PATTERN, **options})
    return randomised(made)


def image_model(**options: Any) -> ImageBackbone:
    sizes = {"img_size": (32, 24), "patch_size": 8, "embed_dim": WIDTH, "depth": 4, "num_classes": 5}
    return randomised(timm.create_model("longseq_tiny_patch16_224", mixer=PATTERN, **{**sizes, **options}))


def draw_tokens(batch: int = 2) -> Tensor:
    return torch.randint(11, (batch, 13), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 24, generator=torch.Generator().manual_seed(1)).double()


def gradients(model: PretrainedModel, inputs: Tensor) -> list[Tensor]:
    found = model(inputs)
    output = found[0] if isinstance(found, tuple) else found
    return [output, *torch.autograd.grad(output.cos().sum(), list(model.parameters()))]


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


def read_by_hand(layer: Directions, x: Tensor, values: list[Tensor], merge: str) -> tuple[Tensor, list[Tensor]]:
    """The output and the values of each order, whose mixers read one after the other."""
    parts, made = [], []
    for index, (mixer, order) in enumerate(zip(layer.readers, layer.orders, strict=True)):
        own = torch.cat((x, values[index]), dim=-1) if values else x
        y = restore(mixer.read(reorder(own, order, LAYOUT))[0], order, LAYOUT)
        projecting: Any = mixer if layer.share == "none" else layer.readers[0]
        parts.append(projecting.out_proj(y[..., :WIDTH]))
        made.append(y[..., WIDTH:])
    return sum(parts, torch.zeros(())) / (len(parts) if merge == "mean" else 1), made


@pytest.mark.parametrize("share", SHARING)
@cases("direction", ["bidirectional", "cross"])
@cases("merge", ["sum", "mean"])
@cases("hooked", [False, True])
def test_each_order_has_its_own_values(share: str, direction: str, merge: str, hooked: bool) -> None:
    layers = [
        mixers.make_reading("rwkv7", WIDTH, options={"num_heads": 2}, direction=direction, share=share, merge=merge)
        for _ in range(2)
    ]
    for place, layer in enumerate(layers):
        for mixer in layer.readers:
            mixer.place_in_model(place, 2)
            if hooked:  # each order is then read by itself
                mixer.register_forward_hook(lambda *_: None)
        randomised(layer)
    x = torch.randn(2, 13, WIDTH, dtype=torch.float64)
    y, _ = layers[0](x, layout=LAYOUT)
    expected, values = read_by_hand(layers[0], x, [], merge)
    assert_same(y, torch.cat((expected, *values), dim=-1))
    y, _ = layers[1](torch.cat((x, *values), dim=-1), layout=LAYOUT)
    assert_same(y, read_by_hand(layers[1], x, values, merge)[0])


@cases(
    "options", [{}, {"mlp": "rwkv"}, {"mlp": None, "norm_order": "post"}, {"positions": "learned", "max_length": 13}]
)
def test_a_language_model_reads_in_parts_and_by_steps(options: dict[str, Any]) -> None:
    model, tokens = language_model(**options), draw_tokens()
    whole, last = model(tokens)
    state, parts = None, []
    for part in tokens.split([5, 1, 7], dim=1):
        logits, state = model(part, state)
        parts.append(logits)
    assert_same(torch.cat(parts, dim=1), whole)
    assert_same(state, last)
    state, steps = model.initial_state(2, dtype=torch.float64), []
    for token in tokens.unbind(1):
        logits, state = model.step(token, state)
        steps.append(logits)
    assert_same(torch.stack(steps, dim=1), whole)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: None)
    assert_same(model.step(tokens[:, 0], model.initial_state(2, dtype=torch.float64))[0], whole[:, 0])
    packed, _ = model(tokens.flatten()[None, :20], cu_seqlens=torch.tensor([0, 13, 20]))
    assert_same(packed[0, :13], whole[0])
    assert_same(packed[0, 13:], whole[1, :7])
    real = torch.arange(13) >= torch.tensor([[0], [6]])
    assert_same(model(tokens, mask=real)[0][1, 6:], model(tokens[1:, 6:])[0][0])
    assert model.generate(tokens[:, :5], 3, temperature=0).shape == (2, 8)


@cases("direction", ["forward", "bidirectional", "alternating"])
def test_recomputing_changes_nothing(direction: str) -> None:
    for make, inputs in ((language_model, draw_tokens()), (image_model, images())):
        expected, *others = (
            gradients(make(recompute=recompute, direction=direction).train(), inputs) for recompute in RECOMPUTE
        )
        assert all(gradient.any() for gradient in expected)
        for found in others:
            assert_same(found, expected)


@pytest.mark.slow
def test_compiling_changes_nothing() -> None:
    model, tokens = language_model(depth=2, mixer="rwkv7"), draw_tokens()[:, :1]
    expected = gradients(model, tokens)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(gradients(compiled, tokens), expected)


@cases("direction", ["bidirectional", "cross"])
@cases("place", ["middle", "first", "none"])
def test_image_models_show_the_residual_without_values(direction: str, place: str) -> None:
    model, x = image_model(direction=direction, class_token=place, global_pool="avg"), images()
    features = model.forward_features(x)
    last, taps = model.forward_intermediates(x, norm=True, output_fmt="NLC", return_prefix_tokens=True)
    assert_same(last, features)
    patches, prefix = taps[-1] if isinstance(taps[-1], tuple) else (taps[-1], features[:, :0])
    assert_same(torch.cat((prefix, patches), dim=1), features)
    mask = torch.ones(features.shape[:2], dtype=torch.bool)
    mask[:, -2:] = False
    masked = model.forward_features(x, attn_mask=mask)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: None)
    assert_same(model.forward_features(x), features)
    assert_same(model.forward_features(x, attn_mask=mask), masked)
