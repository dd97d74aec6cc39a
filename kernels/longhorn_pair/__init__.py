"""What a Longhorn layer does between its projections, for tokens that are read both ways."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longseq.kernels.devices import triton_reasons, width_reasons
from longseq.kernels.diagonal_scan import TRITON_ENTRIES
from longseq.kernels.dispatch import Backend, Call, is_exporting, register_local, remembered, select
from longseq.kernels.longhorn_pair.pair import longhorn_pair_torch
from longseq.kernels.precision import call_dtype, is_mixed

__all__ = ["TRITON_RANKS", "longhorn_pair"]

TRITON_RANKS = 127  # and the bias's, in one tile of a matrix product


def _triton_reasons(call: Call) -> list[str]:
    reasons = triton_reasons(call) + width_reasons(call, TRITON_ENTRIES, "N")
    return reasons + width_reasons(call, TRITON_RANKS + 1, "R")


# Imported in the call, because importing this package must not import Triton; an import statement, because
# torch.compile follows one.
def _longhorn_pair_triton(*args: Any, **kwargs: Any) -> Tensor:
    from longseq.kernels.longhorn_pair.triton_pair import longhorn_pair_triton

    return longhorn_pair_triton(*args, **kwargs)


register_local(
    "longhorn_pair",
    Backend("triton", _longhorn_pair_triton, _triton_reasons),
    Backend("torch", longhorn_pair_torch),
)


def longhorn_pair(
    projected: Tensor,
    taps: Tensor,
    offset: Tensor,
    selection: Tensor,
    rate: Tensor,
    rate_offset: Tensor,
    skip: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """The sum of two Longhorn layers between their projections, of which the second reads from the end.

        x, z = projected;   x = SiLU(short_convolution(x, taps) + offset);   r, k, q = selection x
        y = Σ (longhorn_scan(x, q, k, sigmoid(rate r + rate_offset)) + skip ⊙ x) ⊙ SiLU(z)

    Shapes: projected [B, T, 2 I]; y [B, T, I]; and one of each for the two ways: taps [2, I, W]; offset, rate_offset,
    skip [2, I]; selection [2, R + 2 N, I]; rate [2, I, R]. Matrix products are in the type of `projected`, which is
    y's, the rest in float32, or float64 for float64 inputs.

    Raises ValueError for tensors that do not fit and for a backend that cannot run.
    """
    run = _choose(projected, taps, offset, selection, rate, rate_offset, skip, backend)
    return run(projected, taps, offset, selection, rate, rate_offset, skip)


@remembered("longhorn_pair")
def _choose(
    projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor,
    skip: Tensor, backend: str,
) -> Callable[..., Any]:  # fmt: skip
    inner, ranks = rate.shape[1:]
    entries = (selection.shape[1] - ranks) // 2
    if not is_exporting():
        for name, x, shape in (
            ("projected", projected, (*projected.shape[:2], 2 * inner)),
            ("taps", taps, (2, inner, *taps.shape[2:])),
            ("offset", offset, (2, inner)),
            ("selection", selection, (2, ranks + 2 * max(entries, 1), inner)),
            ("rate", rate, (2, inner, ranks)),
            ("rate_offset", rate_offset, (2, inner)),
            ("skip", skip, (2, inner)),
        ):
            if x.shape != shape:
                raise ValueError(f"longhorn_pair: {name} has shape {tuple(x.shape)}, but must have {shape}")
    parameters = (taps, offset, selection, rate, rate_offset, skip)
    # R counts the bias's column, too: the tile's width, which the self-test rounds up as the kernels do.
    sizes = {"N": entries, "R": ranks + 1, "W": taps.shape[-1]}
    dtype, mixed = call_dtype(projected, *parameters), is_mixed(projected, *parameters)
    return select(
        "longhorn_pair", backend, Call(projected.device, dtype, exporting=is_exporting(), sizes=sizes, mixed=mixed)
    )
