"""When the fused form may run: on GPUs that Triton knows, after it has drawn right tokens there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longseq.kernels.devices import is_emulated, side_stream, triton_reasons
from longseq.kernels.dispatch import Call
from longseq.kernels.token_choice import choice

ROWS, COLUMNS = 8, 40_000  # of the check; more columns than a program reads at once
# A place moved by so much may fall on the neighbouring token: the rounding of a sum of probabilities in float32.
ROUNDING = 1e-5

# What the fused form has kernels of its own for: see `name_kind`.
KINDS = tuple(f"{kind}{seen}" for kind in ("greedy", "drawn", "drawn top_p", "drawn top_k") for seen in ("", " seen"))

# By GPU, type and kind: why the kernel is refused, or None.
_VERDICTS: dict[tuple[int, torch.dtype, str], str | None] = {}


def name_kind(temperature: float, top_k: int | None, top_p: float | None, seen: Tensor | None) -> str:
    """Names the kernel that such a call launches: each is checked apart, so that only those in use are compiled."""
    sorts = [name for name, value in (("top_k", top_k), ("top_p", top_p)) if value is not None]
    return " ".join(["greedy" if temperature == 0 else "drawn", *sorts, *(["seen"] if seen is not None else [])])


def reasons(call: Call) -> list[str]:
    """The reasons against the fused form."""
    found = triton_reasons(call)
    if found or is_emulated() or not torch.cuda.is_available():
        return found
    index = torch.cuda.current_device() if call.device.index is None else call.device.index
    key = index, call.dtype, call.kind
    if key not in _VERDICTS:
        if torch.cuda.is_current_stream_capturing():
            return ["its check has not run, and cannot while a CUDA graph is captured: draw a token once before"]
        _VERDICTS[key] = find_error(*key)
    error = _VERDICTS[key]
    return [] if error is None else [error]


def find_error(index: int, dtype: torch.dtype, kind: str) -> str | None:
    """Draw tokens of random scores on a GPU, and compare them with float64: what is wrong, or None."""
    device = torch.device("cuda", index)
    try:
        with torch.cuda.device(device), torch.cuda.stream(side_stream(index)), torch.no_grad():
            error = compare(device, dtype, kind)
    except Exception as failure:  # a missing compiler, or a kernel that does not compile
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    if error is not None:
        place = torch.cuda.get_device_name(device)
        error = f"the kernel that draws tokens ({kind}) failed its check on {place}: {error}"
        warnings.warn(f"longseq refuses the fused form of token_choice, and torch draws, slowly: {error}")
    return error


def compare(
    device: torch.device, dtype: torch.dtype, kind: str, rows: int = ROWS, columns: int = COLUMNS
) -> str | None:
    """Draw from random rows, of which the last one is no distribution, by the fused form and in float64."""
    from longseq.kernels.token_choice.triton_choice import token_choice_triton

    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
    scores[-1, columns // 2] = torch.nan
    seen = torch.rand(rows, columns, generator=generator) < 0.1 if "seen" in kind.split() else None
    how = _options(kind)
    is_sorted = how["top_k"] is not None or how["top_p"] is not None
    counter = torch.arange(rows, device=device)
    valid = torch.ones(rows, dtype=torch.bool, device=device)
    here = None if seen is None else seen.clone().to(device)
    drawn = token_choice_triton(scores.to(device), counter, valid, here, repetition_penalty=1.3, **how).cpu()

    next_counter = torch.arange(rows) + choice.INCREMENT
    exact = scores.double() if seen is None else choice.penalize(scores.double(), seen, 1.3)
    places = choice.random_places(next_counter).double()
    # Places that are moved down and up give tokens before and behind the right one, in the order of the running sum:
    # that of the tokens, or, where they are sorted, of their scores, of which several may be equal.
    low, high = (
        choice.choose_tokens(exact, (places + shift).clamp(0, 1 - 2**-24), **how) for shift in (-ROUNDING, ROUNDING)
    )
    keys = [low, drawn, high]
    if is_sorted:
        keys = [-exact.gather(1, token.clamp_min(0)[:, None])[:, 0] for token in keys]
    right = (keys[0] <= keys[1]) & (keys[1] <= keys[2])
    right[-1] = drawn[-1] == 0
    if not right.all():
        return f"{int((~right).sum())} of {rows} tokens are wrong"
    if valid.tolist() != [True] * (rows - 1) + [False]:
        return "it does not tell which rows are no numbers"
    if not torch.equal(counter.cpu(), next_counter):
        return "its counters are wrong"
    if seen is not None and here is not None and not torch.equal(here.cpu(), seen.scatter(1, drawn[:, None], True)):
        return "the tokens seen are wrong"
    return None


def _options(kind: str) -> dict[str, Any]:
    parts = kind.split()
    return {
        "temperature": 0.0 if "greedy" in parts else 0.8,
        "top_k": 50 if "top_k" in parts else None,
        "top_p": 0.9 if "top_p" in parts else None,
    }


def list_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of the check on tensors without values, by name."""
    from longseq.kernels.token_choice.triton_choice import token_choice_triton

    for dtype in (torch.bfloat16, torch.float32):
        for kind in KINDS:
            with torch.device("meta"):
                scores, counter = torch.empty(ROWS, COLUMNS, dtype=dtype), torch.empty(ROWS, dtype=torch.int64)
                valid = torch.empty(ROWS, dtype=torch.bool)
                seen = torch.empty(ROWS, COLUMNS, dtype=torch.bool) if "seen" in kind.split() else None
            call = partial(token_choice_triton, scores, counter, valid, seen, repetition_penalty=1.3, **_options(kind))
            yield f"{str(dtype).removeprefix('torch.')} {kind}", call
