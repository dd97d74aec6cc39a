"""From a configuration to image models."""

from __future__ import annotations

import pytest
import timm
import torch

from longseq.backbones.image import ImageBackbone
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.model import ImageModel
from longseq.tasks.training.configuration import resolve


def info(img_size: int) -> DataInfo:
    return DataInfo(["a", "b"], 2, img_size, 3, [0.5] * 3, [0.5] * 3, "bicubic", 1.0)


@pytest.mark.slow
def test_deit3_has_layer_scale(compose_config, tmp_path):
    words = ("recipe=deit3", "model=vit", "model.depth=1", "mixer=attention", f"output={tmp_path}")
    config = resolve(compose_config("train", *words))
    del config["recipe"]["model"]["init_values"]  # a run of the time before the recipe set it
    with torch.device("meta"):
        before = ImageModel().build(config, info(32))
        now = ImageModel().build(resolve(compose_config("train", *words)), info(32))
    assert now.blocks[0].ls2.init_values == 1e-4
    names = dict(before.named_parameters()).keys()
    assert dict(now.named_parameters()).keys() - names == {"blocks.0.ls1.gamma", "blocks.0.ls2.gamma"}


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
@pytest.mark.slow
def test_models_of_timm_keep_their_architecture(name, img_size, patch, compose_config, tmp_path):
    config = compose_config("train", "model=timm", f"model.name={name}", f"output={tmp_path}")
    with torch.device("meta"):
        backbone = ImageModel().build(resolve(config), info(img_size))
    if patch is not None:
        assert backbone.patch_embed.patch_size == (patch, patch)
        assert backbone.patch_embed.img_size == (img_size, img_size)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"img_size": 30, "patch_size": 4}, "2 row(s) and 2 column(s) of pixels unread; sizes that fit are 28 and 32"),
        ({"img_size": 30, "patch_size": (4, 6)}, "2 row(s) and 0 column(s) of pixels unread; sizes that fit are 24 an"),
        ({"img_size": 32, "patch_size": 4}, None),
    ],
)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "longseq_vit_tiny_patch16_224"])
def test_patches_that_do_not_divide_images_cut_them_as_in_timm(name, options, told):
    own = {"mixer": "attention"} if name.startswith("longseq") else {"num_heads": 1}
    torch.manual_seed(0)
    model = timm.create_model(name, embed_dim=16, depth=1, num_classes=3, **own, **options).eval()
    size = options["img_size"]
    images = torch.zeros(1, 3, size, size)
    changed = images.clone()
    changed[:, :, 28:] = 1
    with torch.no_grad():
        assert torch.equal(model(images), model(changed)) == (told is not None)
    remarks = ImageModel().remarks(model)
    assert len(remarks) == (told is not None)
    assert all(told in line for line in remarks)


SMALL_BACKBONE = {"img_size": 16, "patch_size": 8, "num_classes": 3, "embed_dim": 16, "depth": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "there", "here", "message"),
    [
        (
            "deltanet",
            {},
            {"merge": "mean"},
            r"merge is mean in the new model and sum in that of the file: .*model\.merge",
        ),
        ("gla", {}, {"class_token": "first"}, r"give model\.class_token=middle"),
        ("linear_attention", {}, {"direction": "cross"}, r"give model\.direction=bidirectional"),
        (
            "deltanet",
            {},
            {"mixer_options": {"negative_eigenvalues": True}},
            r"mixer\.options\.negative_eigenvalues=false",
        ),
        ("gsa", {}, {"mixer": "abc"}, r"give mixer=gsa$"),
    ],
)
def test_weights_of_another_function_are_refused(mixer, there, here, message):
    trained = ImageBackbone(**SMALL_BACKBONE | {"mixer": mixer} | there)
    model = ImageBackbone(**SMALL_BACKBONE | {"mixer": mixer} | here)
    with pytest.raises(ValueError, match=f"init: .*{message}"):
        ImageModel().initialize(model, trained)


@pytest.mark.slow
def test_weights_are_taken_where_training_alone_differs():
    trained = ImageBackbone(**SMALL_BACKBONE, mixer="mamba", global_pool="token")
    trains = {"drop_path_rate": 0.1, "recompute": "mixer", "mixer_options": {"dt_min": 0.01}}
    model = ImageBackbone(**SMALL_BACKBONE, mixer="mamba", global_pool="avg", **trains)
    ImageModel().initialize(model, trained)
    assert ImageModel().notes(model) == ["the features of patches are pooled by token, and now by avg"]
    # Of one direction nothing is merged.
    one = [ImageBackbone(**SMALL_BACKBONE, direction="forward", merge=merge) for merge in ("sum", "mean")]
    ImageModel().initialize(*one)
    assert torch.equal(one[0].patch_embed.proj.weight, one[1].patch_embed.proj.weight)
