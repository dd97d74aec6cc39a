"""One token at a time: how the steps of the operations are checked and choose between torch and one Triton kernel.

A step's kernel reads the state once, writes the next one once, and keeps all that lies between on the chip; it has no
gradient. The arguments of every step end with `backend`, as those of the operations do.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.checks import check_tensors
from longseq.kernels.devices import triton_reasons, width_reasons
from longseq.kernels.dispatch import Backend, Call, is_exporting, register_step, select

TRITON_STEP_WIDTH = 512  # of a dimension that one program holds whole


def register_steps(op: str, torch_form: Callable[..., Any], triton_form: Callable[..., Any], *held: str) -> None:
    """Register the forms of an operation's step; `held` names what a program of the kernel holds whole."""

    def reasons(call: Call) -> list[str]:
        return _step_reasons(call, held)

    register_step(op, Backend("triton", triton_form, reasons), Backend("torch", torch_form))


def _step_reasons(call: Call, held: tuple[str, ...]) -> list[str]:
    reasons = triton_reasons(call)
    if call.dtype in (torch.float16, torch.bfloat16):
        reasons.append(f"it keeps states in float32, and this one is {call.dtype} (cast it, or use backend='torch')")
    if call.differentiated:
        reasons.append("it has no gradient, and an input requires one (use backend='torch', or torch.no_grad())")
    return reasons + width_reasons(call, TRITON_STEP_WIDTH, *held)


def backend_of_step(backend: str) -> str:
    """The backend of the steps of a layer whose operations run on `backend`.

    Steps have no reference of their own, and no kernels where a gradient is wanted.
    """
    if backend == "reference" or (backend == "triton" and torch.is_grad_enabled()):
        return "torch"
    return backend


def select_step(op: str, backend: str, layouts: Mapping[str, tuple[Tensor | None, str]]) -> Callable[..., Any]:
    """The form of an operation's step that runs, for tensors in the layouts that `check_tensors` takes.

    The tensors of the state are those whose names start with "state". Raises ValueError for tensors that do not fit and
    for a backend that cannot run them.
    """
    sizes = check_tensors(f"{op}_step", layouts, None)
    tensors = {name: x for name, (x, _) in layouts.items() if x is not None}
    states = [x for name, x in tensors.items() if name.startswith("state")]
    dtype = next((x.dtype for x in states if x.dtype != torch.float32), torch.float32)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    call = Call(states[0].device, dtype, exporting=is_exporting(), sizes=sizes, differentiated=wanted)
    return select(f"{op}_step", backend, call)
