"""The precision in which the operations compute: float32, or float64 where an input is float64."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of the arithmetic and of the state for these inputs."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


def call_dtype(values: Tensor, *others: Tensor | None) -> torch.dtype:
    """The dtype by which backends are chosen: float64 if any input is float64, else the dtype of the values."""
    widest = compute_dtype(values, *others)
    return widest if widest == torch.float64 else values.dtype


def is_mixed(values: Tensor, *others: Tensor | None) -> bool:
    """Whether values are in half precision and another tensor is float32: such calls have their own kernels."""
    half = values.dtype in (torch.float16, torch.bfloat16)
    return half and any(tensor is not None and tensor.dtype == torch.float32 for tensor in others)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """A context without autocast on the tensor's device.

    It costs nothing, and adds nothing to an exported graph, where autocast is already off.
    """
    device_type = tensor.device.type
    if device_type == "meta":  # torch.is_autocast_enabled raises for it
        return nullcontext()
    # torch.compile traces the backward pass before its autocast setting is known.
    if torch.compiler.is_dynamo_compiling() or torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
