"""Mixup, CutMix and smoothing are functions of (seed, step, rank)."""

import numpy as np
import pytest
import torch

from longseq.tasks.image.transforms import BatchMixing

IMAGES = torch.arange(8 * 3 * 6 * 6, dtype=torch.float32).view(8, 3, 6, 6)
TARGETS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


def mix(seed=0, update=0, part=0, **options):
    options = {"mixup": 0.8, "cutmix": 1.0} | options
    return BatchMixing(5, seed=seed, **options)(IMAGES.clone(), TARGETS, update=update, part=part)


def test_the_same_step_mixes_the_same():
    for one, other in zip(mix(update=7, part=1)[:2], mix(update=7, part=1)[:2], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", [{"seed": 1}, {"update": 1}, {"part": 1}])
def test_seed_update_and_part_each_draw_anew(change):
    assert not torch.equal(mix()[1], mix(**change)[1])


@pytest.mark.parametrize("options", [{}, {"cutmix": 0.0}, {"mixup": 0.0}, {"mode": "pair"}, {"mode": "elem"}])
def test_soft_targets_sum_to_one(options):
    images, targets, _ = mix(label_smoothing=0.1, **options)
    assert images.shape == IMAGES.shape
    assert targets.shape == (8, 5)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    assert not torch.equal(images, IMAGES)


def test_without_mixing_targets_are_smoothed_only():
    images, targets, _ = mix(mixup=0.0, cutmix=0.0, label_smoothing=0.1)
    assert torch.equal(images, IMAGES)
    assert torch.equal(targets.argmax(1), TARGETS)
    torch.testing.assert_close(targets.amax(1), torch.full((8,), 0.92))


def test_the_global_generator_is_left_alone():
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.rand()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    mix()
    assert np.random.rand() == expected  # noqa: NPY002
