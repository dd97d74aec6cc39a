"""Long stretches in which nothing is read or written, as padding is: gradients pass them unharmed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kernel_inputs import Inputs, gradients, make_inputs

from longseq.kernels import list_ops
from longseq.kernels.dispatch import backends

CHUNK = 64
OPS = [op for op in list_ops() if any(backend.name == "triton" for backend in backends(op))]


def run_apart_from(stretch: slice, inputs: Inputs, **options: Any) -> tuple[torch.Tensor, Any]:
    """The outputs, zero in a stretch, so that no gradient enters there."""
    output, state = inputs.run(**options)
    kept = torch.ones(output.shape[1], dtype=torch.bool, device=output.device)
    kept[stretch] = False
    return output * kept.view(1, -1, *[1] * (output.dim() - 2)), state


def assert_passed(inputs: Inputs, stretch: slice, **options: Any) -> None:
    """Gradients through a stretch of zeros equal the torch form's."""
    zeroed = {name: x.clone() for name, x in inputs.sequences.items()}
    for x in zeroed.values():
        x[:, stretch] = 0
    inputs, run = inputs.replace(zeroed), partial(run_apart_from, stretch)
    expected = gradients(inputs, run, backend="torch", **options)
    for name, x in gradients(inputs, run, backend="triton", **options).items():
        assert x.isfinite().all(), name
        if x.is_floating_point():
            size = expected[name].double().norm().clamp_min(1e-3)
            assert (x.double() - expected[name].double()).norm() < 0.03 * size, name


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "reverse"), [("plain", True), ("gated", False)])
def test_delta_rules(interpreted, variant, reverse):
    sizes = {"H": 1, "K": 16, "V": 16}
    inputs = make_inputs("delta_rule", variant, batch=1, tokens=5 * CHUNK, dtype=torch.bfloat16, sizes=sizes)
    # In the order of reading the stretch is first, as the padding of a document that is read from its end.
    stretch = slice(CHUNK, None) if reverse else slice(0, 4 * CHUNK)
    assert_passed(inputs, stretch, reverse=reverse)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [512, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_operation_on_a_gpu(op, dtype, tokens):
    sizes = {"H": 2, "K": 64, "V": 64, "M": 64, "N": 16}
    if op == "orthogonal_recurrence":
        sizes["D"] = 64  # 64 directions in a space of fewer dimensions: rounding grows to errors of 5 %
    inputs = make_inputs(op, batch=2, tokens=tokens, dtype=dtype, device="cuda", sizes=sizes)
    for stretch in (slice(0, tokens - 70), slice(70, None), slice(70, tokens - 70)):
        assert_passed(inputs, stretch)
