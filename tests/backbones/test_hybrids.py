"""Image models whose layers have different mixers."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from longseq import mixers

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


def test_options_reach_the_mixers_that_they_name() -> None:
    model = tiny(HYBRID, mixer_options={"attention": {"num_heads": 2}, "deltanet": {"head_dim": 4}})
    assert [block.mixer.readers[0].num_heads for block in model.blocks] == [4, 2, 4, 2]
    with pytest.raises(ValueError, match="mixer 'attention' has no option state_size"):
        tiny(HYBRID, mixer_options={"attention": {"state_size": 2}})
    with pytest.raises(ValueError, match="names 5 layers in turn and the model has 4"):
        tiny("4xdeltanet+attention")
