"""Derivatives and batches of torch.func and of dual tensors: every operation is right, or refuses them."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DIFFERENTIATED_BY_TORCH, make_inputs, results
from torch.autograd import forward_ad

from longseq.kernels import list_ops
from longseq.kernels.dispatch import backends

LOCAL = list_ops("local")
OPS = [*list_ops(), *LOCAL]
FORMS = [(op, backend.name) for op in OPS for backend in backends(op) if backend.name != "reference"]
DIFFERENTIATED = (*DIFFERENTIATED_BY_TORCH, *(op for op in LOCAL if op != "longhorn_pair"))


def make_call(op, backend):
    """An operation as a function of its first tensor, and that tensor."""
    inputs = make_inputs(op, batch=1, tokens=2, dtype=torch.float32, sizes={"H": 1})
    name, x = next(iter(inputs.tensors.items()))

    def call(x):
        return results(*inputs.replace({name: x}).run(backend=backend))["output"]

    return call, x


def push_forward(call, x):
    return torch.func.jvp(call, (x,), (torch.ones_like(x),))[1]


def push_dual(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def differentiate(call, x):
    return torch.func.grad(lambda x: call(x).square().sum())(x)


@pytest.mark.parametrize(("op", "backend"), FORMS)
def test_derivatives_are_right_or_refused(interpreted, op, backend):
    call, x = make_call(op, backend)
    for transform in (push_forward, push_dual, differentiate):
        try:
            found = transform(call, x)
        except (RuntimeError, NotImplementedError):
            assert backend == "triton" or op not in DIFFERENTIATED
            continue
        expected = transform(make_call(op, "reference" if op in list_ops() else "torch")[0], x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("op", "backend"), FORMS)
@pytest.mark.slow
def test_a_batch_of_calls_is_right_or_refused(interpreted, op, backend):
    call, x = make_call(op, backend)
    batch = torch.stack((x, 0.5 * x))
    try:
        found = torch.func.vmap(call)(batch)
    except RuntimeError:
        assert backend == "triton" or op not in DIFFERENTIATED
        return
    torch.testing.assert_close(found, torch.stack([call(x) for x in batch]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("op", "backend"), [*FORMS, *((op, "reference") for op in list_ops())])
def test_a_batch_of_gradients_is_right_or_refused(interpreted, op, backend):
    call, x = make_call(op, backend)
    x = x.clone().requires_grad_()
    y = call(x)
    batch = torch.stack((torch.ones_like(y), torch.arange(y.numel(), dtype=y.dtype).cos().view_as(y)))
    try:
        (found,) = torch.autograd.grad(y, x, batch, retain_graph=True, is_grads_batched=True)
    except RuntimeError:
        assert backend != "reference"
        return
    expected = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in batch])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
