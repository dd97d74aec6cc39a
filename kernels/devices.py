"""Conditions for Triton kernels on a device, and the layout of their inputs in memory."""

import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.custom_op import Given
from longseq.kernels.dispatch import Call

# Looked up once, without importing triton: a look-up in each call would break compiled graphs.
TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None
SHARED_MEMORY = 227 * 1024  # bytes that one program can use on an H200
ROOMY = SHARED_MEMORY // 2  # bytes; GPUs with less (compute capabilities 8.6, 8.9 and 12.0: 99 KiB) take fewer stages
SPELLED = {"C": "chunk_size"}  # the names of sizes that are arguments of a call


def is_emulated() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def longseq_shared_memory(device_type: str, index: int | None) -> int:
    """Bytes of shared memory that one program can use on a GPU; without a GPU, an H200's."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return SHARED_MEMORY
    index = torch.cuda.current_device() if index is None else index
    properties: Any = torch.cuda.get_device_properties(index)  # torch 2.14 and before do not declare this one
    return int(properties.shared_memory_per_block_optin)


# torch.compile calls the function while it traces (see `longseq_self_test_verdict`).
longseq_shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def side_stream(index: int) -> torch.cuda.Stream:
    """The one stream of a GPU on which CUDA graphs are recorded, and on which what they hold is tried before.

    A replay of a graph gets slower as soon as another graph was recorded on a stream of its own; so graphs have none of
    their own. The notes of benchmarks/language_models.json have the times.
    """
    return torch.cuda.Stream(torch.device("cuda", index))


def triton_reasons(call: Call) -> list[str]:
    """The reasons against every Triton kernel of this package."""
    reasons = []
    if not TRITON_IS_INSTALLED:
        reasons.append("Triton is not installed (pip install triton)")
    if call.device.type == "cuda" and torch.version.hip is not None and not is_emulated():
        # torch for AMD GPUs names the device type cuda, too. There Triton has neither maxnreg nor the three TF32
        # products of float32.
        reasons.append("it runs on NVIDIA GPUs, and this torch is built for AMD's (use backend='torch')")
    if call.device.type != "cuda" and not is_emulated():
        reasons.append(f"it runs on a CUDA device, not on {call.device.type} (TRITON_INTERPRET=1 emulates one, slowly)")
    if call.dtype == torch.float64:
        reasons.append("it computes in float32, and the inputs are float64 (use backend='torch')")
    if call.exporting:
        reasons.append("an exported graph would need this package to run it (use backend='torch')")
    return reasons


def width_reasons(call: Call, limit: int, *names: str) -> list[str]:
    """The reason against kernels that take the named dimensions up to a limit."""
    wide = [f"{SPELLED.get(name, name)} = {call.sizes[name]}" for name in names if call.sizes.get(name, 1) > limit]
    return [f"{' and '.join(wide)}, and it goes to {limit} (use backend='torch')"] if wide else []


def contiguous(tensor: Given) -> Given:
    """The tensor in contiguous memory; None for None."""
    return None if tensor is None else tensor.contiguous()


def channels_adjacent(tensor: Given) -> Given:
    """The tensor with adjacent channels; batch and time may have any stride. None for None."""
    return tensor if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as [rows, channels] with adjacent channels: a view, where its strides allow one."""
    return channels_adjacent(tensor).reshape(-1, tensor.shape[-1])


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor whose memory holds the rows of `tensor` with adjacent channels, and its stride between rows."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = as_rows(tensor)
    return rows, rows.stride(0)
