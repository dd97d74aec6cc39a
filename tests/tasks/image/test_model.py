"""From a configuration to image models."""

from __future__ import annotations

import pytest
import torch

from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.model import ImageModel
from longseq.tasks.training.configuration import resolve


def info(img_size: int) -> DataInfo:
    return DataInfo(["a", "b"], 2, img_size, 3, [0.5] * 3, [0.5] * 3, "bicubic", 1.0)


@pytest.mark.parametrize(
    ("name", "img_size", "patch"),
    [
        ("swin_tiny_patch4_window7_224", 224, 4),
        ("swin_tiny_patch4_window7_224", 32, 4),
        ("vit_small_patch32_224", 224, 32),
        ("vit_small_patch32_224", 32, 4),
        ("deit_tiny_patch16_224", 32, 4),
        ("levit_128s", 224, None),
        ("resnet18", 32, None),
    ],
)
def test_models_of_timm_keep_their_architecture(name, img_size, patch, compose_config, tmp_path):
    config = compose_config("train", "model=timm", f"model.name={name}", f"output={tmp_path}")
    with torch.device("meta"):
        backbone = ImageModel().build(resolve(config), info(img_size))
    if patch is not None:
        assert backbone.patch_embed.patch_size == (patch, patch)
        assert backbone.patch_embed.img_size == (img_size, img_size)
