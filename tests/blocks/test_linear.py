import pytest
import torch
from torch import nn

from longseq import mixers
from longseq.blocks import linear
from longseq.blocks.linear import AlignedLinear, project_pair


@pytest.fixture
def aligned(monkeypatch):
    """Behave as on a GPU in half precision, and record the widths of products."""
    widths = []
    product = nn.functional.linear

    def watched(x, weight, bias=None):
        widths.append(weight.shape[0])
        return product(x, weight, bias)

    monkeypatch.setattr(linear, "needs_alignment", lambda weight: True)
    monkeypatch.setattr(linear.functional, "linear", watched)
    return widths


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "product"), [(13, 16), (16, 16), (24, 32)])
def test_a_padded_projection_is_the_plain_one(aligned, bias, width, product):
    plain = nn.Linear(5, width, bias=bias).double()
    padded = AlignedLinear(5, width, bias=bias).double()
    padded.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for layer in (plain, padded):
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(results[1], results[0])
    assert aligned == [width, product]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 16), (16, 13), (12, 13), (8, 8)])
def test_a_pair_of_projections_is_two_of_them_at_aligned_widths(aligned, monkeypatch, bias, inputs, outputs):
    pair = [nn.Linear(inputs, outputs, bias=bias).double() for _ in range(2)]
    x = torch.randn(4, 3, inputs, dtype=torch.float64, requires_grad=True)
    needed = [x, *(p for layer in pair for p in layer.parameters())]
    widths = []
    for name in ("bmm", "baddbmm"):
        product = getattr(torch, name)
        record = lambda *args, product=product: widths.append(args[-1].shape[1:]) or product(*args)  # noqa: E731
        monkeypatch.setattr(linear.torch, name, record)
    expected = torch.cat([layer(half) for layer, half in zip(pair, x.chunk(2), strict=True)])
    y = project_pair(*pair, x)
    torch.testing.assert_close(y, expected)
    results, plain = (torch.autograd.grad(out.sin().sum(), needed) for out in (y, expected))
    torch.testing.assert_close(results, plain)
    assert all(size % 16 == 0 for size in widths[0])


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "lattice", "mamba", "mamba2"])
def test_mixers_read_a_padded_projection(aligned, name):
    mixer = mixers.create(name, 24).double()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    y, _ = mixer(x)
    assert max(width % 8 for width in aligned if width > 3) == 0
    aligned.clear()
    expected = torch.stack([step for step, _ in steps(mixer, x)], 1)
    torch.testing.assert_close(y, expected)


def steps(mixer, x):
    state = mixer.initial_state(len(x), dtype=x.dtype)
    for t in range(x.shape[1]):
        y, state = mixer.step(x[:, t], state)
        yield y, state
