import pytest
import torch

from longseq.blocks.patches import PatchEmbed


def build(**options):
    defaults = {"img_size": 32, "patch_size": 8, "stride": None, "in_chans": 3, "embed_dim": 4, "strict_img_size": True}
    return PatchEmbed(**defaults | options)


def test_patches_are_projected_in_place():
    embed = build()
    image = torch.randn(2, 3, 32, 32)
    tokens = embed(image)
    assert tokens.shape == (2, 4, 4, 4)
    patch = image[1, :, 8:16, 24:32]
    expected = (embed.proj.weight * patch).sum((1, 2, 3)) + embed.proj.bias
    torch.testing.assert_close(tokens[1, 1, 3], expected, rtol=1e-4, atol=1e-5)


def test_a_smaller_stride_makes_patches_overlap():
    embed = build(img_size=224, patch_size=16, stride=8)
    assert embed.grid_size == (27, 27)
    assert embed.num_patches == 729
    assert embed.feat_ratio() == 8
    image = torch.randn(1, 3, 224, 224)
    expected = (embed.proj.weight * image[0, :, 8:24, 16:32]).sum((1, 2, 3)) + embed.proj.bias
    torch.testing.assert_close(embed(image)[0, 1, 2], expected, rtol=1e-4, atol=1e-5)


def test_sides_may_differ():
    embed = build(img_size=(16, 40), patch_size=(8, 4), stride=(8, 2))
    assert embed.grid_size == (2, 19)
    assert embed(torch.randn(1, 3, 16, 40)).shape == (1, 2, 19, 4)


def test_another_size_is_refused_unless_allowed():
    with pytest.raises(AssertionError, match=r"image height 40: the model expects \(32, 32\).*dynamic_img_size"):
        build()(torch.randn(1, 3, 40, 32))
    assert build(strict_img_size=False)(torch.randn(1, 3, 40, 32)).shape == (1, 5, 4, 4)


def test_an_image_smaller_than_a_patch_is_refused():
    with pytest.raises(ValueError, match=r"img_size=\(4, 4\) is smaller than one patch"):
        build(img_size=4)


def test_the_patch_size_can_change_unless_patches_overlap():
    embed = build()
    embed.set_input_size(img_size=(16, 16), patch_size=(4, 4))
    assert embed(torch.randn(1, 3, 16, 16)).shape == (1, 4, 4, 4)
    assert embed.feat_ratio() == 4
    overlapping = build(stride=4)
    with pytest.raises(ValueError, match="build a new model"):
        overlapping.set_input_size(patch_size=(4, 4))
    overlapping.set_input_size(img_size=(64, 64))
    assert overlapping.grid_size == (15, 15)
