"""Models built on the meta device and in many processes equal the model that is built in place."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

import longseq.backbones.image  # noqa: F401  (its models register with timm)
from longseq import mixers
from longseq.backbones.autoencoder import SequenceAutoencoder
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.tokens import TokenBackbone

# Options that add parameters or buffers to those of a mixer's defaults.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gsa": [{"data_dependent_gate": False}],
    "lattice": [{"forget_gate": False}],
    "vla": [{"convolution_width": 4}],
}
CASES = [(name, options) for name in mixers.mixer_names() for options in ({}, *OPTIONS.get(name, []))]


def text_model(mixer: str, options: dict[str, Any]) -> nn.Module:
    return TokenBackbone(
        vocab_size=11, d_model=32, depth=2, mixer=mixer, mixer_options=options, norm="layer", positions="learned",
        max_length=8, tie_embeddings=False,
    )  # fmt: skip


def image_model(mixer: str, options: dict[str, Any]) -> nn.Module:
    return timm.create_model(
        "longseq_vit_tiny_patch16_224", mixer=mixer, mixer_options=options, embed_dim=32, depth=1, img_size=32,
        num_classes=3,
    )  # fmt: skip


def assert_drawn_alike(build: Any) -> None:
    torch.manual_seed(3)
    expected = build()
    following = torch.rand(3)
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))  # a tensor that nobody sets would have the memory's last content, often zeros
    torch.manual_seed(3)
    model.init_weights()
    assert torch.equal(torch.rand(3), following), "the draws after it differ"
    drawn, wanted = model.state_dict(), expected.state_dict()
    assert drawn.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(drawn[name], wanted[name])]
    assert not different
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], tensor) for name, tensor in expected.named_buffers())


@pytest.mark.parametrize("build", [text_model, image_model])
@pytest.mark.parametrize(("mixer", "options"), CASES)
def test_a_model_from_the_meta_device_is_the_one_made_directly(mixer: str, options: Any, build: Any) -> None:
    assert_drawn_alike(lambda: build(mixer, options))


def test_a_classifier_from_the_meta_device_is_the_one_made_directly() -> None:
    assert_drawn_alike(lambda: TextClassifier(num_classes=3, vocab_size=7, d_model=16, pooling="attention"))


def test_an_autoencoder_from_the_meta_device_is_the_one_made_directly() -> None:
    torch.manual_seed(3)
    model = SequenceAutoencoder(TokenBackbone(vocab_size=11, d_model=32, depth=1)).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
