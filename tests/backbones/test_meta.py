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
from longseq.backbones.document_pairs import PairClassifier
from longseq.backbones.linear_text import LinearTextClassifier
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


DOCUMENTS: dict[str, Any] = {"num_classes": 3, "vocab_size": 300, "d_model": 16}
IMAGES: dict[str, Any] = {"embed_dim": 32, "depth": 1, "img_size": 32, "num_classes": 3}


@pytest.mark.parametrize(
    "build",
    [
        lambda: TextClassifier(**DOCUMENTS, pooling="attention"),
        lambda: TextClassifier(**DOCUMENTS, hashed_ngrams=3, ngram_buckets=64, mlp="rwkv", norm_order="post"),
        lambda: PairClassifier(**DOCUMENTS, direction="bidirectional", share_directions="none"),
        lambda: LinearTextClassifier(num_classes=2, vocabulary=["a", "b"]),
        lambda: SequenceAutoencoder(TokenBackbone(vocab_size=11, d_model=32, depth=1)),
        lambda: timm.create_model(
            "longseq_vit_tiny_patch16_224", **IMAGES, reg_tokens=2, global_pool="map", init_values=1e-4, mlp_ratio=2.0
        ),
        lambda: timm.create_model("longseq_tiny_patch16_224", **IMAGES, mixer="longhorn", share_directions="none"),
    ],
    ids=["attention_pooling", "ngrams", "pairs", "linear", "autoencoder", "image_parts", "two_mixers"],
)
def test_every_part_of_a_model_has_a_reset(build: Any) -> None:
    assert_drawn_alike(build)
