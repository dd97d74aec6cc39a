"""A Longhorn layer between its projections, for tokens that are read in both directions."""

from torch import Tensor

from longseq.kernels.checks import check_shapes
from longseq.kernels.diagonal_scan import TRITON_ENTRIES
from longseq.kernels.dispatch import Call, is_exporting
from longseq.kernels.longhorn_pair.pair import longhorn_pair_torch
from longseq.kernels.operation import operation
from longseq.kernels.precision import call_dtype, is_mixed

TRITON_RANKS = 127  # ranks of the rate, which share one tile of a matrix product with the bias


def _judge(
    op: str, projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor,
    skip: Tensor,
) -> Call:  # fmt: skip
    inner, ranks = rate.shape[1:]
    entries = (selection.shape[1] - ranks) // 2
    check_shapes(
        op,
        {
            "projected": (projected, (*projected.shape[:2], 2 * inner)),
            "taps": (taps, (2, inner, *taps.shape[2:])),
            "offset": (offset, (2, inner)),
            "selection": (selection, (2, ranks + 2 * max(entries, 1), inner)),
            "rate": (rate, (2, inner, ranks)),
            "rate_offset": (rate_offset, (2, inner)),
            "skip": (skip, (2, inner)),
        },
    )
    parameters = (taps, offset, selection, rate, rate_offset, skip)
    # R counts the bias's column, too: it is the width of the tile, which the self-test rounds up as the kernels do.
    sizes = {"N": entries, "R": ranks + 1, "W": taps.shape[-1]}
    dtype, mixed = call_dtype(projected, *parameters), is_mixed(projected, *parameters)
    return Call(projected.device, dtype, exporting=is_exporting(), sizes=sizes, mixed=mixed)


@operation(_judge, triton="triton_pair", limits={"N": TRITON_ENTRIES, "R": TRITON_RANKS + 1}, torch=longhorn_pair_torch)
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
    """The sum of two Longhorn layers between their projections; the second reads from the last token to the first.

        x, z = projected;   x = SiLU(short_convolution(x, taps) + offset);   r, k, q = selection x
        y = Σ (longhorn_scan(x, q, k, sigmoid(rate r + rate_offset)) + skip ⊙ x) ⊙ SiLU(z)

    Shapes: projected [B, T, 2 I]; y [B, T, I]. Parameters have one row for each direction: taps [2, I, W]; offset,
    rate_offset, skip [2, I]; selection [2, R + 2 N, I]; rate [2, I, R]. Matrix products are in the type of `projected`,
    which is also y's. The rest is in float32, or float64 for float64 inputs.
    """
