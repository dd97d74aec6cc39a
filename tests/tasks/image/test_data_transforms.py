"""Transforms: shapes and types for grey and colour, published presets, normalisation and its inverse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import cases
from image_data import image_info
from PIL import Image
from timm.data import create_transform

from longseq.tasks.image.transforms import (
    Augmentation,
    PixelErasing,
    denormalize,
    evaluation_transform,
    normalize,
    training_transform,
)


def picture(mode="RGB", size=(50, 40)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


DEIT = {"crop": "random_resized", "hflip": 0.5, "color_jitter": 0.3, "auto_augment": "rand-m9-mstd0.5-inc1"}
DEIT3 = {"crop": "padded", "padding_mode": "reflect", "hflip": 0.5, "color_jitter": 0.3, "auto_augment": "3a"}
PADDED = [
    {"crop": "padded", "padding": padding, "padding_mode": mode, "erasing": {"prob": 1, "count": 3}}
    for mode in ("constant", "reflect", "edge", "symmetric")
    for padding in (0, 4)
]
POLICIES = ("rand-m9-tweights", "rand-n1-t3a-p0.5", "augmix-m5-w4-d2", "v0r-mstd0.5")
SMALL = {"crop": "padded", "padding": 2, "erasing": {"prob": 1.0, "mode": "pixel", "count": 1}}


@cases("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
@cases("in_chans", [1, 3])
@cases("options", [DEIT, DEIT3, SMALL, {}, *PADDED, *({"auto_augment": policy} for policy in POLICIES)])
def test_training_gives_bytes_of_the_models_shape(options, in_chans, mode):
    transform = training_transform(image_info(in_chans=in_chans), Augmentation(**options))
    pixels = transform(picture(mode))
    assert (pixels.shape, pixels.dtype) == ((in_chans, 32, 32), torch.uint8)


@pytest.mark.slow
@cases("in_chans", [1, 3])
@cases("crop_pct", [0.8, 0.875, 1.0, 1.25])
@cases("img_size", [48, [48, 80], [80, 48]])
@cases("mode", ["center", "squash", "border"])
def test_evaluation_is_that_of_timm(mode, img_size, crop_pct, in_chans):
    about = replace(image_info(in_chans=in_chans, crop_pct=crop_pct), img_size=img_size, crop_mode=mode)
    theirs = create_transform(
        (in_chans, *about.sides),
        interpolation=about.interpolation,
        crop_pct=crop_pct,
        crop_mode=mode,
        mean=tuple(about.mean),
        std=tuple(about.std),
    )
    for size in [(300, 40), (40, 300), (7, 9), (48, 80), (101, 77)]:
        image = picture("RGB" if in_chans == 3 else "L", size)
        torch.testing.assert_close(normalize(evaluation_transform(about)(image), about), theirs(image))


def test_center_crop_trains_on_what_evaluation_sees():
    train = training_transform(image_info(), Augmentation(crop="center"))
    assert torch.equal(train(picture()), evaluation_transform(image_info())(picture()))


@pytest.mark.parametrize("in_chans", [1, 3])
def test_normalize_and_back(in_chans):
    pixels = torch.randint(0, 256, (4, in_chans, 8, 8), dtype=torch.uint8)
    normalised = normalize(pixels, image_info(in_chans=in_chans))
    expected = (pixels[0, 0].float() / 255 - 0.5) / 0.2
    torch.testing.assert_close(normalised[0, 0], expected)
    torch.testing.assert_close(denormalize(normalised, image_info(in_chans=in_chans)), pixels.float() / 255)


def test_erasing_fills_with_the_mean_or_with_noise_around_it():
    pixels = torch.full((3, 32, 32), 7, dtype=torch.uint8)
    constant = PixelErasing(image_info(), prob=1.0, mode="const")(pixels)
    changed = (constant != 7).any(0)
    assert 0.01 < changed.float().mean() < 0.5
    assert constant[:, changed].unique(dim=1).flatten().tolist() == [128, 102, 76]
    noise = PixelErasing(image_info(), prob=1.0, mode="pixel")(pixels)
    assert len(noise.unique()) > 20
    assert torch.equal(PixelErasing(image_info(), prob=0.0)(pixels), pixels)
