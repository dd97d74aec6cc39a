"""Input checks that the operations share. None reads a value, so none waits for a device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.dispatch import is_exporting
from longseq.kernels.packing import check_borders


def check_tensors(
    op: str, layouts: Mapping[str, tuple[Tensor | None, str]], cu_seqlens: Tensor | None, *, mask: Tensor | None = None
) -> dict[str, int]:
    """Check the tensors of a call against their layouts and return the size of each dimension by name.

    `layouts` maps an argument's name to its tensor (None when it was left out) and its dimensions, such as "B T H K";
    the first one holds B and T (only B for one token) and must be there. The same letter must have the same size
    everywhere. "S" is the leading dimension of a state: the batch size, or the number of segments when `cu_seqlens` is
    given; "W-1" is one less than "W", "2B" twice "B". While a graph is exported nothing is compared, because a
    comparison of symbolic sizes would become a condition of the graph.
    """
    given = {name: (tensor, layout.split()) for name, (tensor, layout) in layouts.items() if tensor is not None}
    if is_exporting():
        return {dim: size for tensor, layout in given.values() for dim, size in zip(layout, tensor.shape, strict=True)}
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    if cu_seqlens is not None:
        sizes["S"], source["S"] = check_borders(op, cu_seqlens), "the segments of cu_seqlens"
    first_name, (first, _) = next(iter(given.items()))
    for name, (tensor, layout) in given.items():
        shape = tuple(tensor.shape)
        if len(shape) != len(layout):
            raise ValueError(
                f"{op}: {name} has shape {shape}, but must have {len(layout)} dimensions [{', '.join(layout)}]"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} is {tensor.dtype}, but must be floating point")
        if tensor.device != first.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} but {first_name} on {first.device}")
        for dim, size in zip(layout, shape, strict=True):
            if dim == "B":
                sizes["2B"], source["2B"] = 2 * size, f"two readings of the batch of {name}"
                sizes.setdefault("S", size)
                source.setdefault("S", f"the batch of {name}")
            if dim == "W":
                sizes["W-1"], source["W-1"] = size - 1, f"{name}, less the current token"
            if size != sizes.setdefault(dim, size):
                raise ValueError(
                    f"{op}: {name} has shape {shape}, but its {dim} of [{', '.join(layout)}] "
                    f"must be {sizes[dim]} as in {source[dim]}"
                )
            source.setdefault(dim, name)
    if mask is not None:
        check_mask(op, mask, first_name, first)
    if cu_seqlens is not None and sizes["B"] != 1:
        raise ValueError(f"{op}: cu_seqlens needs a batch of 1, but {first_name} has a batch of {sizes['B']}")
    return sizes


def check_shapes(op: str, shapes: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Check that tensors have these shapes, by name; nothing while a graph is exported, as in `check_tensors`."""
    if is_exporting():
        return
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, but must have {tuple(shape)}")


def check_parts(op: str, state: Any, *parts: str, name: str = "initial_state") -> tuple[Any, ...]:
    """The parts of a state that is a tuple, each None where there is no state."""
    if state is None:
        return (None,) * len(parts)
    if not isinstance(state, tuple) or len(state) != len(parts):
        raise ValueError(f"{op}: {name} must be a tuple ({', '.join(parts)})")
    return state


def check_scale(op: str, scale: object) -> None:
    """Raise ValueError for a scale that is a tensor, which would get no gradient."""
    if isinstance(scale, Tensor):
        raise ValueError(f"{op}: scale is a tensor, and has no gradient here")


def check_chunk_size(op: str, chunk_size: int, *, power_of_two: bool = False) -> None:
    """Check that a chunk size is positive, and a power of two where chunks are split in halves."""
    if chunk_size < 1 or (power_of_two and chunk_size & (chunk_size - 1)):
        kind = "a power of two" if power_of_two else "at least 1"
        raise ValueError(f"{op}: chunk_size is {chunk_size}, but must be {kind}")


def check_mask(op: str, mask: Tensor, name: str, like: Tensor) -> None:
    """Check the dtype, device and shape of a mask `[B, T]` for `like [B, T, ...]`, the tensor called `name`."""
    if (mask.dtype, mask.device, mask.shape) != (torch.bool, like.device, like.shape[:2]):
        raise ValueError(f"{op}: mask must be bool {tuple(like.shape[:2])} on {like.device}, as {name}")


def check_counter(op: str, name: str, counter: Tensor | None, like: Tensor | None) -> None:
    """Check the counter of a state, called `name`: one integer for each row of `like`, the state's first tensor."""
    if counter is None or like is None or is_exporting():
        return
    if (counter.dtype, counter.device, counter.shape) != (torch.int64, like.device, like.shape[:1]):
        raise ValueError(f"{op}: {name} must be int64 [{like.shape[0]}] on {like.device}")
