"""From a configuration to image models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import timm
import torch

from longseq.backbones.image import ImageBackbone
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.model import ImageModel, state_data
from longseq.tasks.training.configuration import resolve
from longseq.timm_models import stated_data


def info(img_size: int) -> DataInfo:
    return DataInfo(["a", "b"], 2, img_size, 3, [0.5] * 3, [0.5] * 3, "bicubic", 1.0)


@pytest.mark.parametrize(
    ("name", "img_size", "patch"),
    [
        ("swin_tiny_patch4_window7_224", 32, 4),
        ("vit_small_patch32_224", 32, 4),
        ("levit_128s", 224, None),
        ("resnet18", 32, None),
    ],
)
@pytest.mark.slow
def test_models_of_timm_keep_their_architecture(name, img_size, patch, compose_config, tmp_path):
    config = compose_config("train", "model=timm", f"model.name={name}", f"output={tmp_path}")
    with torch.device("meta"):
        backbone = ImageModel().build(resolve(config), info(img_size))
    if patch is not None:
        assert backbone.patch_embed.patch_size == (patch, patch)
        assert backbone.patch_embed.img_size == (img_size, img_size)


SMALL_BACKBONE = {"img_size": 16, "patch_size": 8, "num_classes": 3, "embed_dim": 16, "depth": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "there", "here", "message"),
    [
        ("deltanet", {}, {"merge": "mean"}, "merge is mean in the new model and sum in that of the file"),
        ("gla", {}, {"class_token": "first"}, "class_token is first in the new model and middle in"),
        ("linear_attention", {}, {"direction": "cross"}, "direction is cross in the new model and bidirectional in"),
        ("deltanet", {}, {"mixer_options": {"negative_eigenvalues": True}}, "negative_eigenvalues"),
        ("gsa", {}, {"mixer": "abc"}, "mixer is abc in the new model and gsa in"),
    ],
)
def test_weights_of_another_function_are_refused(mixer, there, here, message):
    trained = ImageBackbone(**SMALL_BACKBONE | {"mixer": mixer} | there)
    model = ImageBackbone(**SMALL_BACKBONE | {"mixer": mixer} | here)
    with pytest.raises(ValueError, match=f"init: .*{message}"):
        ImageModel().initialize(model, trained)


@pytest.mark.slow
def test_a_trained_model_states_the_crop_of_its_run():
    model = timm.create_model("test_resnet", num_classes=2, pretrained_cfg_overlay={"crop_mode": "squash"})
    assert stated_data(model)["crop_mode"] == "squash"
    state_data(model, replace(info(64), class_names=["a", "b"], num_classes=2))
    assert model.pretrained_cfg["crop_mode"] == "center"
    assert timm.data.resolve_model_data_config(model)["crop_mode"] == "center"
    assert DataInfo.from_dict(stated_data(model)).crop_mode == "center"


@pytest.mark.slow
@pytest.mark.slow
def test_weights_are_taken_where_training_alone_differs():
    trained = ImageBackbone(**SMALL_BACKBONE, mixer="mamba", global_pool="token")
    trains = {"drop_path_rate": 0.1, "recompute": "mixer", "mixer_options": {"dt_min": 0.01}}
    model = ImageBackbone(**SMALL_BACKBONE, mixer="mamba", global_pool="avg", **trains)
    ImageModel().initialize(model, trained)
    # Of one direction nothing is merged.
    one = [ImageBackbone(**SMALL_BACKBONE, direction="forward", merge=merge) for merge in ("sum", "mean")]
    ImageModel().initialize(*one)
    assert torch.equal(one[0].patch_embed.proj.weight, one[1].patch_embed.proj.weight)
