import pytest
import torch
from timm.layers import Mlp
from torch import nn

from longseq import mixers
from longseq.blocks.norm import ResidualLayerNorm, ResidualRMSNorm
from longseq.blocks.residual import Block, PostNormBlock


def directions(width=16, mixer="linear_attention"):
    return mixers.make_reading(mixer, width, options={}, direction="bidirectional")


@pytest.mark.parametrize("kind", [ResidualRMSNorm, ResidualLayerNorm])
def test_the_norm_reads_the_residual_and_answers_in_the_type_of_the_weights(kind):
    norm = kind(16, eps=1e-5).to(torch.bfloat16)
    x = torch.randn(3, 16) * 1e-3
    centred = x - x.mean(-1, keepdim=True) if kind is ResidualLayerNorm else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", [ResidualRMSNorm, ResidualLayerNorm])
def test_the_norm_answers_in_the_type_of_autocast(kind):
    x, branch = torch.randn(3, 16), torch.randn(3, 16).bfloat16()
    norm = kind(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
        total, y = norm(x, branch)
        assert (total.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert norm.double()(x.double()).dtype == torch.float64
    assert kind(16)(x).dtype == torch.float32


@pytest.mark.parametrize("kind", [Block, PostNormBlock])
def test_drop_path_leaves_branches_out_for_each_packed_sequence(kind):
    norms = {"norm": nn.LayerNorm(16), "mlp_norm": nn.LayerNorm(16)}
    block = kind(directions(), mlp=Mlp(16, 32), drop_path=0.5, **norms)
    borders = torch.arange(0, 65 * 3, 3)
    x = torch.randn(1, 64 * 3, 16)
    torch.manual_seed(0)
    same = (block(x, cu_seqlens=borders)[0] == x).all(-1).view(64, 3)
    dropped = same.all(1)
    assert torch.equal(same.any(1), dropped), "a sequence is left out as a whole"
    assert 6 < dropped.sum() < 28
    assert not (block.eval()(x, cu_seqlens=borders)[0] == x).all(-1).any()
