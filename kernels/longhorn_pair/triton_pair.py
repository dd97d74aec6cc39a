"""A pair of Longhorn layers between their projections, in Triton: one node for autograd, made of its parts' kernels.

No gradient of the convolved tokens is stored only to be added. The product with `selection` adds its gradient to the
scan's. The backward pass of the convolution computes the gradient that the gated product contributes while it reads.
The gradients of the convolution's input and of the gate are written to the two halves of one tensor.
"""

import torch
from torch import Tensor

from longseq.kernels.custom_op import Gradients, custom_op, records_gradient
from longseq.kernels.diagonal_scan.triton_scan import allocate_checkpoints, diagonal_scan, differentiate_scan
from longseq.kernels.longhorn_pair.triton_rates import add_ranks, differentiate_rates, find_rates
from longseq.kernels.precision import without_autocast
from longseq.kernels.reading import number_of
from longseq.kernels.short_convolution.triton_convolution import causal_convolution, differentiate_convolution
from longseq.kernels.silu_product.triton_product import differentiate, silu_product_triton
from longseq.kernels.triton_launch import ROW, Launch, block_width, cdiv, find_launch, launch_options, next_power_of_2

BOTH_WAYS = number_of("second_half")
ALIGNMENT = 16  # Rows of selected numbers are padded to a multiple of this: matrix products load many numbers at once
# By bytes of a number: rows and channels of a program's block, warps, stages. Those for two bytes were measured on an
# H200. There, four stages of twice the rows are a tenth faster, but need more shared memory than other GPUs have.
RATES = {
    2: {"find_rates": Launch(128, 128, 4, 1), "differentiate_rates": Launch(32, 128, 8, 3)},
    4: {"find_rates": Launch(64, 64, 4, 1), "differentiate_rates": Launch(32, 64, 8, 1)},
}
PROGRAMS = 264  # the approximate grid of the gradient of rates
ADDED = 32  # rows of a program that sums the gradients of r


def _allocate(
    projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor, skip: Tensor,
    save: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, tokens, channels = projected.shape
    width = _aligned(selection.shape[1])
    readings = (2 * batch, tokens)
    x, rates, scanned = (projected.new_empty((*readings, channels // 2)) for _ in range(3))
    key = projected.new_empty((*readings, (selection.shape[1] - rate.shape[2]) // 2))
    return (
        projected.new_empty((batch, tokens, channels // 2)),
        x,
        projected.new_empty((2, width, channels // 2)),
        projected.new_empty((*readings, width)),
        rates,
        scanned,
        allocate_checkpoints(x, key, None, save),
    )


@custom_op("longhorn_pair", _allocate)
def longhorn_pair(
    projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor, skip: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y [B, T, I], and the tensors that the gradient needs.

    These are: the convolved tokens x [2 B, T, I], one reading in each half of the batch; the weight [2, S, I] that
    selects from them, padded to a width S that is a multiple of 16; the selected numbers [2 B, T, S], which are r, k, q
    and zeros; the rates; the result of the scan; its checkpoints, empty without `save`.
    """
    values, gate = projected.chunk(2, dim=-1)
    x = causal_convolution(values, taps, offset, None, None, True, BOTH_WAYS)
    wide = _widen(selection, projected.dtype)
    selected = torch.bmm(x.view(2, -1, x.shape[-1]), wide.mT).view(*x.shape[:2], wide.shape[1])
    key, query = _keys_and_queries(selected, selection, rate)
    rates = _find_rates(selected, rate, rate_offset)
    scanned, _, checkpoints = diagonal_scan(x, rates, key, query, None, None, None, BOTH_WAYS, save)
    y = silu_product_triton(scanned, gate, x, skip)
    return y, x, wide, selected, rates, scanned, checkpoints


def _aligned(width: int) -> int:
    return width + -width % ALIGNMENT


def _widen(selection: Tensor, dtype: torch.dtype) -> Tensor:
    """`selection` [2, R + 2 N, I] padded with rows of zeros to the width S, a multiple of ALIGNMENT: [2, S, I]."""
    width = selection.shape[1]
    wide = selection.new_empty((2, _aligned(width), selection.shape[2]), dtype=dtype)
    wide[:, :width] = selection
    wide[:, width:] = 0.0
    return wide


def _keys_and_queries(selected: Tensor, selection: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and queries as views of their columns of `selected`."""
    ranks = rate.shape[2]
    entries = (selection.shape[1] - ranks) // 2
    return selected[..., ranks : ranks + entries], selected[..., ranks + entries : ranks + 2 * entries]


def _find_rates(selected: Tensor, rate: Tensor, rate_offset: Tensor) -> Tensor:
    """The rates [2 B, T, I]."""
    inner, ranks = rate.shape[1:]
    rates = selected.new_empty((*selected.shape[:2], inner))
    size = selected.element_size()
    table = RATES[size]["find_rates"]
    rows = rates.shape[0] * rates.shape[1] // 2
    find_launch(
        find_rates, rates.device, 2 * cdiv(rows, table.block) * cdiv(inner, table.step),
        (rows, inner, selected.shape[-1]),
        R=ranks, BLOCK_R=block_width(ranks, ROW[size]), BLOCK_T=table.block, BLOCK_D=table.step, **table.options,
    )(selected, rate.contiguous(), rate_offset.contiguous(), rates)  # fmt: skip
    return rates


def _differentiate_rates(
    selected: Tensor, rate: Tensor, rates: Tensor, d_rates: Tensor, d_selected: Tensor, chosen: int, weighs: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rate and rate_offset; writes the gradient of r to the first columns of d_selected.

    The two that are returned are empty without `weighs`.

    The columns of d_selected from `chosen` on, which are padding, are filled with zeros.
    """
    inner, ranks = rate.shape[1:]
    size, width = selected.element_size(), selected.shape[-1]
    table = RATES[size]["differentiate_rates"]
    rows = rates.shape[0] * rates.shape[1] // 2
    columns = block_width(ranks + 1, ROW[size])
    channels = max(table.step * ROW[size] // columns, ROW[size])  # fewer for more ranks: both sums must fit
    blocks, slabs = cdiv(rows, table.block), cdiv(inner, channels)
    programs = max(1, min(blocks, PROGRAMS // (2 * slabs)))
    d_ranks = selected.new_empty((slabs, ranks, 2 * rows), dtype=torch.float32)
    d_weights = selected.new_empty((programs, *rate.shape) if weighs else (0,), dtype=torch.float32)
    d_biases = selected.new_empty((programs, 2, inner) if weighs else (0,), dtype=torch.float32)
    find_launch(
        differentiate_rates, rates.device, 2 * programs * slabs, (rows, blocks, programs, inner, width),
        R=ranks, BLOCK_R=columns, BLOCK_T=table.block, BLOCK_D=channels, **table.options,
    )(
        selected, rate.contiguous(), rates, d_rates, d_ranks, d_weights if weighs else None,
        d_biases if weighs else None,
    )  # fmt: skip
    find_launch(
        add_ranks, rates.device, cdiv(2 * rows, ADDED), (2 * rows, slabs, width),
        R=ranks, CHOSEN=chosen, BLOCK_S=next_power_of_2(width), BLOCK_T=ADDED, **launch_options(4),
    )(d_ranks, d_selected)  # fmt: skip
    if weighs:
        d_weights, d_biases = d_weights.sum(0), d_biases.sum(0)
    return d_weights.to(rate.dtype), d_biases


@longhorn_pair.gradient("projected taps offset selection rate rate_offset skip", outputs=6)
def longhorn_pair_backward(
    projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor, skip: Tensor,
    x: Tensor, wide: Tensor, selected: Tensor, rates: Tensor, scanned: Tensor, checkpoints: Tensor, dy: Tensor,
    wanted: list[bool],
) -> Gradients:  # fmt: skip
    """The gradients of `projected` and of the six parameters."""
    # Two gradients that one kernel finds are computed together.
    convolves, weighs = wanted[1] or wanted[2], wanted[4] or wanted[5]
    values, gate = projected.chunk(2, dim=-1)
    chosen = selection.shape[1]
    d_projected = torch.empty_like(projected, memory_format=torch.contiguous_format)
    d_values, d_gate = d_projected.chunk(2, dim=-1)
    d_scanned = dy.new_empty(dy.shape)
    d_skip = differentiate(scanned, gate, x, skip, dy, d_scanned, d_gate, None, wanted[6])
    d_selected = torch.empty_like(selected)
    key, query = _keys_and_queries(selected, selection, rate)
    d_key, d_query = _keys_and_queries(d_selected, selection, rate)
    dx, d_rates = x.new_empty(x.shape), rates.new_empty(rates.shape)
    differentiate_scan(
        x, rates, key, query, None, None, checkpoints, d_scanned, None, BOTH_WAYS, dx, d_rates, d_key, d_query
    )
    d_rate, d_rate_offset = _differentiate_rates(selected, rate, rates, d_rates, d_selected, chosen, weighs)
    rows, d_rows = x.view(2, -1, x.shape[-1]), d_selected.view(2, -1, selected.shape[-1])
    with without_autocast(projected):
        d_selection = None
        if wanted[3]:
            d_selection = torch.bmm(d_rows.mT, rows)[:, :chosen].to(selection.dtype).contiguous()
        dx.view(rows.shape).baddbmm_(d_rows, wide)
    d_taps, d_offset, _ = differentiate_convolution(
        values, taps, offset, None, None, dx, True, BOTH_WAYS, d_values, d_scanned, skip.contiguous(),
        weighs=convolves,
    )  # fmt: skip
    d_rate_offset = d_rate_offset.to(rate_offset.dtype)
    return d_projected, d_taps, d_offset, d_selection, d_rate, d_rate_offset, d_skip


def longhorn_pair_triton(
    projected: Tensor, taps: Tensor, offset: Tensor, selection: Tensor, rate: Tensor, rate_offset: Tensor, skip: Tensor
) -> Tensor:
    """`longhorn_pair` in Triton."""
    tensors = (projected, taps, offset, selection, rate, rate_offset, skip)
    with without_autocast(projected):
        return longhorn_pair(*tensors, records_gradient(*tensors))[0]
