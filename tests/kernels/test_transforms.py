"""Derivatives and batches of torch.func and of dual tensors: every operation is right, or raises one line."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import make_inputs, results
from torch.autograd import forward_ad

from longseq.kernels import list_ops
from longseq.kernels.dispatch import backends, list_local_ops

LOCAL = list_local_ops()
OPS = [*list_ops(), *LOCAL]
TRITON_OPS = [op for op in OPS if any(backend.name == "triton" for backend in backends(op))]
# Operations whose torch form torch differentiates; the others have a backward pass of their own.
DIFFERENTIATED_BY_TORCH = ("convolved_features", "short_convolution", *(op for op in LOCAL if op != "longhorn_pair"))
# Operations whose kernels return or take lists, which torch.func.vmap cannot batch.
WITHOUT_BATCHES = [
    *("delta_rule", "linear_attention", "orthogonal_recurrence", "slot_attention", "variational_linear_attention"),
]
NO_BATCHES = r"^torch.func.vmap does not pass through the kernels of this operation: give backend='reference'"
NO_TRANSFORM = r"^torch.func.vmap, grad, jvp .* do not pass through this operation, .* give backend='reference'"
NO_BATCHED_GRADIENTS = r"^is_grads_batched=True, .* takes one gradient at a time; leave it out, or give backend='refer"
NO_FORWARD_MODE = r"^torch.func.jvp, jacfwd and dual tensors: .* no forward-mode derivative; backend='reference'"
NO_FUNCTIONAL_GRADIENT = r"^torch.func.grad, vjp, jacrev and hessian do not pass .*; backend='reference' has one"


def make_call(op, backend):
    """An operation as a function of its first tensor, and that tensor."""
    inputs = make_inputs(op, tokens=3, dtype=torch.float32)
    name, x = next(iter(inputs.tensors.items()))

    def call(x):
        return results(*inputs.replace({name: x}).run(backend=backend))["output"]

    return call, x


def push_forward(call, x):
    return torch.func.jvp(call, (x,), (torch.ones_like(x),))[1]


def push_dual(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def batch_of_jvp(call, x):
    return torch.func.vmap(lambda x: push_forward(call, x))(torch.stack((x, x)))


def differentiate(call, x):
    return torch.func.grad(lambda x: call(x).square().sum())(x)


def hessian(call, x):
    return torch.func.hessian(lambda x: call(x).sum())(x)


@pytest.mark.parametrize("op", TRITON_OPS)
def test_kernels_refuse_transforms_in_one_line(interpreted, op):
    call, x = make_call(op, "triton")
    refusals = {push_forward: NO_FORWARD_MODE, push_dual: NO_FORWARD_MODE, batch_of_jvp: NO_FORWARD_MODE}
    refusals |= {differentiate: NO_FUNCTIONAL_GRADIENT, hessian: NO_FUNCTIONAL_GRADIENT}
    for transform, words in refusals.items():
        with pytest.raises(RuntimeError, match=words) as caught:
            transform(call, x)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", OPS)
def test_plain_forms_are_right_or_refused(op):
    call, x = make_call(op, "torch")
    for transform in (push_forward, push_dual, differentiate):
        if op not in DIFFERENTIATED_BY_TORCH:
            words = r"autograd\.Function" if transform is push_dual else NO_TRANSFORM
            with pytest.raises((RuntimeError, NotImplementedError), match=words):
                transform(call, x)
        elif op in list_ops():
            expected = transform(make_call(op, "reference")[0], x)
            torch.testing.assert_close(transform(call, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_a_batch_of_plain_forms_is_right_or_refused_in_one_line(op):
    call, x = make_call(op, "torch")
    batch = torch.stack((x, 0.5 * x))
    expected = torch.stack([call(x) for x in batch])
    if op in DIFFERENTIATED_BY_TORCH:
        torch.testing.assert_close(torch.func.vmap(call)(batch), expected)
    else:
        with pytest.raises(RuntimeError, match=NO_TRANSFORM) as caught:
            torch.func.vmap(call)(batch)
        assert "\n" not in str(caught.value)
    if op in list_ops():
        found = torch.func.vmap(make_call(op, "reference")[0])(batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("op", TRITON_OPS)
@pytest.mark.slow
def test_a_batch_of_calls_is_right_or_refused(interpreted, op):
    call, x = make_call(op, "triton")
    batch = torch.stack((x, 0.5 * x))
    if op in WITHOUT_BATCHES:
        with pytest.raises(RuntimeError, match=NO_BATCHES) as caught:
            torch.func.vmap(call)(batch)
        assert "\n" not in str(caught.value)
    else:
        torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([call(x) for x in batch]))


def check_batch_of_gradients(call, x, *, refused):
    """A batch of gradients is right, or refused in one line."""
    x = x.clone().requires_grad_()
    y = call(x)
    batch = torch.stack((torch.ones_like(y), torch.arange(y.numel(), dtype=y.dtype).cos().view_as(y)))
    if refused:
        with pytest.raises(RuntimeError, match=NO_BATCHED_GRADIENTS) as caught:
            torch.autograd.grad(y, x, batch, is_grads_batched=True)
        assert "\n" not in str(caught.value)
        return
    expected = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in batch])
    (found,) = torch.autograd.grad(y, x, batch, is_grads_batched=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("op", OPS)
def test_a_batch_of_gradients_of_plain_forms_is_right_or_refused_in_one_line(op):
    passes = (*DIFFERENTIATED_BY_TORCH, "cumulative_softmax")
    check_batch_of_gradients(*make_call(op, "torch"), refused=op not in passes)
    if op in list_ops():
        check_batch_of_gradients(*make_call(op, "reference"), refused=False)


@pytest.mark.parametrize("op", ["delta_rule", "short_convolution", "silu_product"])
def test_kernels_refuse_a_batch_of_gradients_in_one_line(interpreted, op):
    check_batch_of_gradients(*make_call(op, "triton"), refused=True)


def test_tensors_without_a_tangent_pass_inside_a_level_of_dual_tensors(interpreted):
    call, x = make_call("short_convolution", "triton")
    expected = call(x)
    with forward_ad.dual_level():
        assert torch.equal(call(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [push_forward, push_dual])
def test_a_compiled_function_refuses_forward_mode(interpreted, transform):
    call, x = make_call("short_convolution", "triton")
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
        torch.compile(lambda x: transform(call, x), backend="aot_eager")(x)
