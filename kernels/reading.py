"""The direction in which sequences are read: from the first token, from the last, or half of the batch each way."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from longseq.kernels.dispatch import is_exporting

# False: from the start; True: from the end; "second_half": the first half of the rows of the batch from the start, the
# second from the end.
Reverse: TypeAlias = bool | Literal["second_half"]


def check_reverse(op: str, reverse: Reverse, rows: int, cu_seqlens: Tensor | None) -> None:
    """Check `reverse` for a batch of `rows` rows."""
    if reverse not in (False, True, "second_half"):
        raise ValueError(f"{op}: reverse is {reverse!r}, but must be False, True or 'second_half'")
    if reverse == "second_half" and cu_seqlens is not None:
        raise ValueError(
            f"{op}: reverse is 'second_half', but packed segments are all read one way; call once for each direction"
        )
    if reverse == "second_half" and not is_exporting() and rows % 2:
        raise ValueError(
            f"{op}: reverse is 'second_half' of {rows} rows, but their number must be even; stack two batches of a size"
        )


def turn(x: Tensor, reverse: Reverse) -> Tensor:
    """Bring `x [B, T, ...]` from its own order into the order of reading, or back."""
    if reverse == "second_half" and is_exporting():  # one Gather, and its index once in a file
        rows, tokens = x.shape[:2]
        row, place = torch.arange(rows, device=x.device)[:, None], torch.arange(tokens, device=x.device)
        read = row * tokens + torch.where(row < rows // 2, place, tokens - 1 - place)
        return x.flatten(0, 1).index_select(0, read.flatten()).unflatten(0, (rows, tokens))
    if reverse == "second_half":
        forward, backward = halves(x)
        return torch.cat((forward, backward.flip(1)))
    return x.flip(1) if reverse else x


def check_own_parameters(op: str, name: str, parameter: Tensor, reverse: Reverse) -> None:
    """Check a parameter with a leading dimension: the first for reading forward, the second for reading backward."""
    if reverse != "second_half" or parameter.shape[0] != 2:
        raise ValueError(
            f"{op}: {name} has shape {tuple(parameter.shape)} and reverse is {reverse!r}, but with a parameter for "
            "each direction they must be (2, ...) and 'second_half'"
        )


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `x [B, ...]` that are read forward, and those that are read backward."""
    rows = x.shape[0] // 2
    if is_exporting():  # two nodes in place of five
        return x[:rows], x[rows:]
    forward, backward = x.unflatten(0, (2, rows)).unbind()
    return forward, backward


def half(x: Tensor, index: int) -> Tensor:
    """The rows of `x [B, ...]` that are read forward (0) or backward (1)."""
    return halves(x)[index]


def run_each_way(
    form: Callable[..., tuple[Tensor, Any]], own: Mapping[str, Tensor | None], rows: Mapping[str, Tensor], *,
    initial_state: Tensor | None, reverse: Reverse, **call: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run a form for one direction twice: forward with the first of each of the parameters `own`, then backward.

    Each run reads its half of `rows` and of the state. The results are stacked.
    """

    def run(i: int) -> tuple[Tensor, Any]:
        state = None if initial_state is None else half(initial_state, i)
        parameters = {name: None if x is None else x[i] for name, x in own.items()}
        halved = {name: half(x, i) for name, x in rows.items()}
        return form(**halved, **parameters, initial_state=state, reverse=bool(i), **call)

    (forward, ahead), (backward, behind) = run(0), run(1)
    return torch.cat((forward, backward)), None if ahead is None else torch.cat((ahead, behind))


def number_of(reverse: Reverse) -> int:
    """The number of a direction in the kernels (see `direction` in triton_tiles.py)."""
    return 2 if reverse == "second_half" else int(reverse)
