import pytest
import torch
from torch import nn

from longseq.blocks import patches
from longseq.blocks.patches import PatchEmbed, PatchProjection


def build(**options):
    defaults = {"img_size": 32, "patch_size": 8, "stride": None, "in_chans": 3, "embed_dim": 4, "strict_img_size": True}
    return PatchEmbed(**defaults | options)


def test_a_smaller_stride_makes_patches_overlap():
    embed = build(img_size=224, patch_size=16, stride=8)
    assert embed.grid_size == (27, 27)
    assert embed.num_patches == 729
    assert embed.feat_ratio() == 8
    image = torch.randn(1, 3, 224, 224)
    expected = (embed.proj.weight * image[0, :, 8:24, 16:32]).sum((1, 2, 3)) + embed.proj.bias
    torch.testing.assert_close(embed(image)[0, 1, 2], expected, rtol=1e-4, atol=1e-5)


def test_another_size_is_refused_unless_allowed():
    with pytest.raises(AssertionError, match=r"image height 40: the model expects \(32, 32\).*dynamic_img_size"):
        build()(torch.randn(1, 3, 40, 32))
    assert build(strict_img_size=False)(torch.randn(1, 3, 40, 32)).shape == (1, 5, 4, 4)


def test_the_patch_size_can_change_unless_patches_overlap():
    embed = build()
    embed.set_input_size(img_size=(16, 16), patch_size=(4, 4))
    assert embed(torch.randn(1, 3, 16, 16)).shape == (1, 4, 4, 4)
    assert embed.feat_ratio() == 4
    overlapping = build(stride=4)
    with pytest.raises(ValueError, match="keep their size"):
        overlapping.set_input_size(patch_size=(4, 4))
    overlapping.set_input_size(img_size=(64, 64))
    assert overlapping.grid_size == (15, 15)


@pytest.mark.parametrize("size", [(3, 32, 16), (2, 21, 30)])
def test_patches_side_by_side_are_projected_by_one_product(monkeypatch, size):
    projection = PatchProjection(size[0], 6, (8, 4), (8, 4))
    image = torch.randn(2, *size, requires_grad=True)
    weights = projection.weight, projection.bias, image

    def run():
        tokens = projection(image)
        return tokens, *torch.autograd.grad(tokens.square().sum(), weights)

    expected = run()
    monkeypatch.setattr(patches, "needs_alignment", lambda weight: True)
    monkeypatch.setattr(nn.Conv2d, "forward", None)
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_patches_on_a_gpu_are_those_of_a_convolution():
    projection = PatchProjection(3, 192, 16, 16).cuda()
    image = torch.randn(8, 3, 224, 224, device="cuda")

    def run(dtype):
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            tokens = projection(image)
        assert tokens.dtype == dtype
        return tokens, *torch.autograd.grad(tokens.float().square().mean(), (projection.weight, projection.bias))

    for found, wanted in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        assert (found - wanted).norm() < 1e-2 * wanted.norm()
