"""The borders of sequences that are packed into one row, and what operations derive from the borders once per batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

# With "1" the values of cu_seqlens are checked in every call of every backend: they must begin with 0, never fall, and
# end with T. The check waits for the GPU. Without it the triton backend does not check them, and outputs of tokens that
# no sequence holds are undefined memory.
SEGMENTS_VARIABLE = "LONGSEQ_CHECK_CU_SEQLENS"

Found = TypeVar("Found")


class Packing:
    """N sequences end to end in a row of T tokens; operations and layers take it in place of `cu_seqlens`.

    It keeps what they derive from the borders: positions, the sequence of each chunk, groups of similar lengths. All
    layers of a batch share it, in the forward and the backward pass. With a plain `cu_seqlens` every operation derives
    it again.

    Two cases wait for the GPU, once: borders on the GPU without `tokens`, and backends that need the lengths on the
    host (the torch forms of recurrences). Neither waits if `cu_seqlens` is given on the CPU, with the `device` of the
    tokens.

    Args:
        cu_seqlens: `[N + 1]` integers, the borders: from 0 to T, not decreasing. They are copied.
        tokens: T, if it is known; by default the last border.
        max_seqlen: no sequence is longer; by default the longest length where the borders are on the CPU, and T else.
        device: of the tokens; by default the device of the borders.

    Attributes:
        cu_seqlens: the borders on the tokens' device.
        count: N.
        sequence: `[T]`, the number of the sequence of each token.
        positions: `[T]`, the place of each token in its sequence.

    Raises:
        ValueError: borders on the CPU do not cut T tokens into segments. Borders on the GPU are checked with
            LONGSEQ_CHECK_CU_SEQLENS=1 alone, because the check waits for the GPU.
    """

    cu_seqlens: Tensor
    tokens: int
    max_seqlen: int
    count: int
    sequence: Tensor
    positions: Tensor

    def __init__(
        self,
        cu_seqlens: Tensor,
        tokens: int | None = None,
        *,
        max_seqlen: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_borders("Packing", cu_seqlens)
        found: dict[Any, Any] = {}
        if tokens is None:
            tokens = int(cu_seqlens[-1])
        has_values = not (torch.compiler.is_compiling() or is_faked(cu_seqlens) or cu_seqlens.is_meta)
        if has_values and (cu_seqlens.device.type == "cpu" or is_checked()):
            bounds = segment_bounds(cu_seqlens, tokens)
            found["bounds"] = bounds
            longest = max(end - start for start, end in pairwise(bounds))
            if max_seqlen is not None and max_seqlen < longest:
                raise ValueError(f"max_seqlen={max_seqlen}, but cu_seqlens holds a sequence of {longest} tokens")
            max_seqlen = longest if max_seqlen is None else max_seqlen
        most, count = tokens if max_seqlen is None else max_seqlen, cu_seqlens.shape[0] - 1
        borders = cu_seqlens.to(cu_seqlens.device if device is None else device, copy=True)
        sequence = _number_tokens(borders, tokens)
        positions = torch.arange(tokens, device=borders.device) - borders[sequence]
        self._set(borders, found, tokens, most, count, sequence, positions)

    def _set(self, borders: Tensor, found: dict[Any, Any], *parts: Any) -> Packing:
        self.cu_seqlens, self._found = borders, found
        self.tokens, self.max_seqlen, self.count, self.sequence, self.positions = parts
        if not torch.compiler.is_compiling():
            # Operations pass only the tensor of borders on, also to their backward passes: it carries what was found.
            found["packing"], found["borders are"] = parts, _identity(borders)
            borders._longseq_found = found  # type: ignore[attr-defined]
        return self

    def once(self, key: Any, find: Callable[[], Found]) -> Found:
        """Return what `find` returned at the first call with this key. Each caller has a name of its own in its keys.

        Compiled graphs call `find` every time: their compiler joins equal calls.
        """
        return find() if torch.compiler.is_compiling() else _once(self._found, key, find)

    @property
    def bounds(self) -> list[int]:
        """The borders on the host, checked. If they are on a GPU, the first call waits for it."""
        return self.once("bounds", lambda: segment_bounds(self.cu_seqlens, self.tokens))

    @property
    def lengths(self) -> Tensor:
        """`[N]`, of each sequence."""
        return self.once("lengths", lambda: self.cu_seqlens.long().diff())

    @property
    def borders(self) -> Tensor:
        """The borders as int32, as fused attention takes them."""
        if self.cu_seqlens.dtype == torch.int32:
            return self.cu_seqlens
        return self.once("borders", lambda: self.cu_seqlens.to(torch.int32))

    @property
    def longest(self) -> int:
        """The longest length, or the one that was stated. If neither is known on the host, the first call waits."""
        if self.max_seqlen < self.tokens:
            return self.max_seqlen
        return self.once("longest", lambda: max(end - start for start, end in pairwise(self.bounds)))

    def turned(self) -> Packing:
        """The same row read from its end: the last sequence comes first."""
        return self.once("turned", self._turn)

    def _turn(self) -> Packing:
        bounds, found = self._found.get("bounds"), {}
        if bounds is not None:
            found["bounds"] = [self.tokens - bound for bound in reversed(bounds)]
        sequence = self.count - 1 - self.sequence.flip(0)
        positions = (self.lengths[self.sequence] - 1 - self.positions).flip(0)
        parts = self.tokens, self.max_seqlen, self.count, sequence, positions
        return Packing.__new__(Packing)._set(self.tokens - self.cu_seqlens.flip(0), found, *parts)

    def __repr__(self) -> str:
        return f"Packing({self.count} sequences, {self.tokens} tokens, max_seqlen={self.max_seqlen})"


def pack_like(cu_seqlens: Tensor | Packing | None, x: Tensor) -> Packing | None:
    """The packing of tokens `x [1, T, ...]` on their device; one that was made before is handed on.

    Raises:
        ValueError: x has more than one row, or another number of tokens than the packing.
    """
    if cu_seqlens is None:
        return None
    if x.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens needs a batch of 1, but there are {x.shape[0]} rows; concatenate the sequences along time"
        )
    if isinstance(cu_seqlens, Packing):
        check_tokens(cu_seqlens, x)
        return cu_seqlens
    found = _found_of(cu_seqlens)
    if found is not None and cu_seqlens.device == x.device:
        return Packing.__new__(Packing)._set(cu_seqlens, found, *found["packing"])
    return Packing(cu_seqlens, x.shape[1], device=x.device)


def check_tokens(packing: Packing, x: Tensor) -> None:
    """Refuse a packing of another number of tokens than `x [1, T, ...]` has."""
    if packing.tokens != x.shape[1]:
        raise ValueError(
            f"cu_seqlens ends with {packing.tokens}, but must end with T = {x.shape[1]}, the number of packed tokens"
        )


def find_once(cu_seqlens: Tensor, key: Any, find: Callable[[], Found]) -> Found:
    """Return what `find` returns: found once for the borders of a `Packing`, in each call for other borders."""
    found = _found_of(cu_seqlens)
    return find() if found is None else _once(found, key, find)


def sequence_of_tokens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[T]`, the number of the sequence of each token; wrong borders still give numbers of existing sequences."""
    found = _found_of(cu_seqlens)
    return _number_tokens(cu_seqlens, tokens) if found is None else found["packing"][3]


def _found_of(cu_seqlens: Tensor) -> dict[Any, Any] | None:
    """What was found from the borders of a `Packing`; None for others, and for borders that have changed since.

    Copies by `copy.deepcopy` and `pickle` bring it along, and may change without it. Compiled graphs find it again.
    """
    if torch.compiler.is_compiling():
        return None
    found: dict[Any, Any] | None = getattr(cu_seqlens, "_longseq_found", None)
    return found if found is not None and found["borders are"] == _identity(cu_seqlens) else None


def _identity(borders: Tensor) -> tuple[int, int]:
    """The tensor, and how often it was written to; tensors of inference mode do not count that."""
    return id(borders), -1 if borders.is_inference() else borders._version


def _number_tokens(borders: Tensor, tokens: int) -> Tensor:
    place = torch.arange(tokens, device=borders.device)
    # On a GPU, an index out of range is an error that ends the process's use of the GPU.
    return torch.bucketize(place, borders[1:], right=True).clamp_max(borders.shape[0] - 2)


def _once(found: dict[Any, Any], key: Any, find: Callable[[], Found]) -> Found:
    if key in found:
        return found[key]
    with torch.inference_mode(False):  # a packing may be read in inference mode first, and trained on later
        value = find()
    # While a CUDA graph is captured, results have no values yet: they must not be kept.
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        found[key] = value
    return value


def is_checked() -> bool:
    """Whether the values of `cu_seqlens` are checked wherever they lie."""
    return os.environ.get(SEGMENTS_VARIABLE) == "1"


def is_faked(x: Tensor) -> bool:
    """Whether a tensor has no values, as under torch.export."""
    return isinstance(x, torch._subclasses.FakeTensor)


def check_borders(caller: str, cu_seqlens: Tensor) -> int:
    """Check type and shape of `cu_seqlens`; return the number of segments."""
    integers = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not integers or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{caller}: cu_seqlens must be an int32 or int64 tensor [N + 1] with N >= 1 segments: 0, then their ends"
        )
    return cu_seqlens.shape[0] - 1


def segment_bounds(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The values of cu_seqlens on the host, checked. Waits for the device that holds them."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must begin with 0, never fall, and end with T = {tokens}, the number of packed tokens, not go "
            f"from {bounds[0]} to {bounds[-1]}{'' if bounds == sorted(bounds) else ' and falls between'}"
        )
    return bounds
