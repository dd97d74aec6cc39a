import pytest
import torch
from timm import layers
from torch import nn

from longseq.blocks.mlp import SwiGLU


def test_the_gated_mlp_is_that_of_timm():
    theirs = layers.SwiGLU(5, 12, bias=False).double()
    ours = SwiGLU(5, 12, backend="reference").double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for mlp in (theirs, ours):
        y = mlp(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *mlp.parameters()])])
    torch.testing.assert_close(results[1], results[0])


CHANGES = {
    "activation": lambda mlp: setattr(mlp, "act", nn.ReLU()),
    "hook of the activation": lambda mlp: mlp.act.register_forward_hook(lambda module, given, found: 2 * found),
    "hook of the dropout": lambda mlp: mlp.drop1.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
    "norm": lambda mlp: setattr(mlp, "norm", nn.LayerNorm(12, elementwise_affine=False)),
    "dropout": lambda mlp: setattr(mlp.drop2, "p", 1.0),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_parts_that_others_change_take_part(change, recompute):
    theirs, ours = layers.SwiGLU(5, 12, bias=False), SwiGLU(5, 12, recompute=recompute)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 5)
    before = ours(x)
    for mlp in (theirs, ours):
        change(mlp)
    torch.testing.assert_close(ours(x), theirs(x))
    assert not torch.allclose(ours(x), before)
