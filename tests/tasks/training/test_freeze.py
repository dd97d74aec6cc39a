"""Frozen layers are not trained, and all others are."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from cases import cases
from lightning.pytorch import Trainer
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils.data import DataLoader

from longseq.backbones.classifier import TextClassifier
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.training.model import freeze
from longseq.tasks.training.muon import create_muon
from longseq.tasks.training.recipe import Training

SMALL: dict[str, Any] = {"vocab_size": 7, "d_model": 16, "depth": 2, "mlp": None}


def classifier() -> nn.Module:
    return TextClassifier(num_classes=2, pooling="attention", **SMALL)


def image_model() -> nn.Module:
    return timm.create_model("longseq_vit_tiny_patch16_224", embed_dim=32, depth=2, img_size=32, num_classes=3)


def vision_transformer() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", embed_dim=32, depth=2, num_heads=2, img_size=32, num_classes=3)


@cases("build", [classifier, image_model, vision_transformer])
def test_parts_are_frozen_by_their_depth(build: Any) -> None:
    blocks = {1: ("blocks.0.",), 2: ("blocks.0.", "blocks.1.", "norm."), "body": ("blocks.0.", "blocks.1.", "norm.")}
    for part in ("embeddings", 1, 2, "body", None):
        model = build()
        freeze(model, part)
        for name, parameter in model.named_parameters():
            own = name.removeprefix("body.")
            stem = not own.startswith(("blocks.", "norm.", "head.", "pooling."))
            frozen = part is not None and (stem or own.startswith(blocks.get(part, ("?",))))
            assert parameter.requires_grad is not frozen, f"{part}: {name}"


def test_an_update_changes_no_frozen_layer_and_scales_the_rates_of_the_others() -> None:
    torch.manual_seed(0)
    model = classifier()
    freeze(model, "embeddings")
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    rates = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert found["body.embedding.weight"] is None
    assert found["body.blocks.0.norm1.weight"] == 0.25
    assert found["body.blocks.1.norm1.weight"] == found["body.norm.weight"] == 0.5
    assert found["pooling.query.weight"] == found["head.weight"] == found["head.bias"] == 1.0
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model(torch.tensor([[0, 1, 2]])).square().sum().backward()
    optimizer.step()
    unchanged = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert "body.embedding.weight" in unchanged
    assert not {"body.blocks.0.norm1.weight", "head.weight"} & unchanged


@pytest.mark.slow
@pytest.mark.parametrize("part", ["body", 2])
def test_frozen_batch_norms_keep_their_statistics(part: Any) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    freeze(model, part)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader: Any = DataLoader([(torch.randn(3, 32, 32), number % 3) for number in range(8)], batch_size=4)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(ImageClassifier(model, num_classes=3, training=Training(learning_rate=0.1)), loader, loader)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    frozen = ("conv1.", "bn1.", "layer1.", "layer2.") + (("layer3.", "layer4.") if part == "body" else ())
    assert not {name for name in changed if name.startswith(frozen)}
    assert "fc.weight" in changed
    assert ("layer4.0.bn1.running_mean" in changed) == (part == 2)


def test_muon_takes_the_rates_of_layers_and_leaves_frozen_ones() -> None:
    torch.manual_seed(0)
    model = classifier()
    optimizer = create_muon(model, lr=0.1, layer_decay=0.5)
    found = {id(p): (group["muon"], group["lr_scale"]) for group in optimizer.param_groups for p in group["params"]}
    rates = {name: found[id(parameter)] for name, parameter in model.named_parameters()}
    assert rates["body.embedding.weight"] == (False, 0.125)
    assert rates["body.blocks.0.norm1.weight"] == (False, 0.25)
    assert rates["body.blocks.0.mixer.in_proj.weight"] == (True, 0.25)
    assert rates["body.blocks.1.mixer.in_proj.weight"] == (True, 0.5)
    assert rates["pooling.projection.weight"] == rates["head.weight"] == (False, 1.0)

    freeze(model, "body")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = create_muon(model, lr=0.1)
    model(torch.tensor([[0, 1, 2]])).square().sum().backward()
    optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert "head.weight" in changed
    assert not {name for name in changed if name.startswith("body.")}
