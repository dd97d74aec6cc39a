"""Image models whose layers have different mixers."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from longseq import mixers
from longseq.blocks.reading import DIRECTIONS

HYBRID = "deltanet+attention"


def tiny(mixer: Any, chassis: str = "", **options: Any) -> Any:
    torch.manual_seed(0)
    defaults = {"img_size": (32, 24), "patch_size": 8, "embed_dim": 16, "depth": 4, "num_classes": 5}
    return timm.create_model(f"longseq_{chassis}tiny_patch16_224", mixer=mixer, **defaults | options).eval()


def images(batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, 32, 24)


def kinds(model: Any) -> list[str]:
    names = {mixers.get(name): name for name in mixers.mixer_names()}
    return [names[type(block.mixer.readers[0])] for block in model.blocks]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("3xdeltanet+attention", ["deltanet"] * 3 + ["attention"]),
        (["deltanet", "mamba"], ["deltanet", "mamba"] * 2),
        ("deltanet+attention@1@2", ["deltanet", "attention", "attention", "deltanet"]),
        ({"default": "deltanet", "layers": {3: "attention"}}, ["deltanet"] * 3 + ["attention"]),
    ],
    ids=str,
)
def test_each_layer_has_the_mixer_of_the_pattern(pattern: Any, expected: list[str]) -> None:
    model = tiny(pattern)
    assert kinds(model) == expected
    assert model.mixer_name in (pattern, "deltanet+mamba", "deltanet+attention@3")
    with torch.no_grad():
        assert model(images()).isfinite().all()


def test_a_pattern_of_one_name_is_the_model_of_that_mixer() -> None:
    one, listed = tiny("deltanet", mixer_options={"head_dim": 4}), tiny(["deltanet"], mixer_options={"head_dim": 4})
    assert one.state_dict().keys() == listed.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(one(images()), listed(images()))


def test_options_reach_the_mixers_that_they_name() -> None:
    model = tiny(HYBRID, mixer_options={"attention": {"num_heads": 2}, "deltanet": {"head_dim": 4}})
    assert [block.mixer.readers[0].num_heads for block in model.blocks] == [4, 2, 4, 2]
    with pytest.raises(ValueError, match="mixer 'attention' has no option state_size"):
        tiny(HYBRID, mixer_options={"attention": {"state_size": 2}})
    with pytest.raises(
        ValueError, match=r"head_dim=4 does not: the names are deltanet, attention, as in deltanet.head_dim=4"
    ):
        tiny(HYBRID, mixer_options={"head_dim": 4})
    with pytest.raises(ValueError, match="names 5 layers in turn and the model has 4"):
        tiny("4xdeltanet+attention")


def test_each_mixer_of_a_hybrid_alternates_by_itself() -> None:
    orders = [block.mixer.orders for block in tiny("deltanet+mamba", direction="alternating").blocks]
    assert orders == [("forward",), ("forward",), ("backward",), ("backward",)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("chassis", ["", "vit_"])
def test_hybrids_train_and_checkpoint(chassis: str, direction: str) -> None:
    model = tiny(HYBRID, chassis, direction=direction, global_pool="avg").train()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images()).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(gradient.any() for gradient in gradients[0])
    torch.testing.assert_close(*gradients)


def test_hybrids_count_the_work_of_each_layer() -> None:
    whole = tiny(HYBRID, depth=2).flops()
    parts = [tiny(name, depth=1).flops() for name in ("deltanet", "attention")]
    without = tiny(HYBRID, depth=2)
    stem = without.flops() - sum(block.flops(13) for block in without.blocks)
    assert whole == sum(parts) - stem


@pytest.mark.slow
def test_hybrids_export() -> None:
    model, x = tiny(HYBRID, depth=2), images()
    with torch.no_grad():
        exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
        batch = torch.cat([x, x.flip(-1), x])
        torch.testing.assert_close(exported(batch), model(batch), rtol=1e-4, atol=1e-5)
        traced = torch.jit.trace(model, x)
        torch.testing.assert_close(traced(batch), model(batch), rtol=1e-4, atol=1e-5)
