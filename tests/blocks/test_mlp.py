import torch
from timm import layers

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
