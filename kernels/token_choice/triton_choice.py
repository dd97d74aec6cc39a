"""The choice of a token in one kernel: a program reads a row of scores, and draws its token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longseq.kernels.devices import channels_adjacent
from longseq.kernels.token_choice.choice import INCREMENT, penalize, sort_scores
from longseq.kernels.triton_launch import find_launch, launch_options, next_power_of_2

# BLOCK: the most scores that a program reads at once. WARP: scores of a block for each warp, up to WARPS of them.
BLOCK = 8192
WARP = 256
WARPS = 32


@triton.jit
def _place(counter):
    """A place in [0, 1) from the counter of a row, as a multiple of 2^-24 in float32."""
    x = counter.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _load(scores, seen, column, columns, temperature, penalty, HAS_PENALTY: tl.constexpr, IS_GREEDY: tl.constexpr):
    """A block of a row's scores, with the penalty and divided by the temperature; -inf behind the last one."""
    x = tl.load(scores + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    if HAS_PENALTY:
        was_seen = tl.load(seen + column, mask=column < columns, other=0) != 0
        x = tl.where(was_seen, tl.where(x > 0, x / penalty, x * penalty), x)
    return x if IS_GREEDY else x / temperature


# Sizes are not specialized: the kernel that was checked is the one that runs at every size.
@triton.jit(do_not_specialize=["columns", "vocabulary", "row_stride", "increment"])
def choose(
    scores, tokens, seen, counters, valid, drawn, columns, vocabulary, row_stride, temperature, top_p, penalty,
    increment,
    IS_GREEDY: tl.constexpr, IS_SORTED: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_SEEN: tl.constexpr,
    HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws the token of one row: `drawn`; changes its counter, `valid` and `seen`.

    If IS_SORTED, a row has the scores of `columns` tokens, the best one first, and the tokens themselves in `tokens`.
    """
    row = tl.program_id(0).to(tl.int64)
    counter = tl.load(counters + row) + increment
    scores += row * row_stride
    seen_here = seen
    if HAS_SEEN:
        seen_here += row * vocabulary
    # The largest score and the sum of all weights exp(x - largest), for each place in a block and then for the row.
    largest = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _load(scores, seen_here, column, columns, temperature, penalty, HAS_PENALTY, IS_GREEDY)
        if IS_GREEDY:
            where = tl.where(x > best, column, where)
            best = tl.maximum(best, x)
            total += tl.where(x != x, x, 0.0)  # NaN if there is one
        else:
            before = largest
            largest = tl.maximum(largest, x)  # finite from the start: the difference of two infinities is NaN
            total = total * tl.exp(before - largest) + tl.exp(x - largest)
    found = tl.zeros((), tl.int32)
    if IS_GREEDY:
        most = tl.max(best, 0)
        found = tl.min(tl.where(best == most, where, 2147483647), 0)
        is_valid = (tl.abs(most) < float("inf")) & (tl.sum(total, 0) == 0.0)
    else:
        most = tl.max(largest, 0)
        whole = tl.sum(total * tl.exp(largest - most), 0)
        is_valid = (whole > 0.0) & (whole < float("inf"))
        kept, last = whole, columns
        if HAS_TOP_P:
            # A token is kept while those before it have not reached p, so that the best one always is.
            kept = 0.0
            last = 0
            passed = 0.0
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = _load(scores, seen_here, column, columns, temperature, penalty, HAS_PENALTY, IS_GREEDY)
                weight = tl.exp(x - most)
                stays = (passed + tl.cumsum(weight, 0) - weight < top_p * whole) & (column < columns)
                kept += tl.sum(tl.where(stays, weight, 0.0), 0)
                last += tl.sum(stays.to(tl.int32), 0)
                passed += tl.sum(weight, 0)
        aim = _place(counter) * kept
        # The block in which the running sum of weights passes the aim, and the sum before it.
        block = 0
        before_block = 0.0
        passed = 0.0
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = _load(scores, seen_here, column, columns, temperature, penalty, HAS_PENALTY, IS_GREEDY)
            own = tl.sum(tl.where(column < last, tl.exp(x - most), 0.0), 0)
            is_next = (own > 0.0) & (passed <= aim)
            block = tl.where(is_next, start, block)
            before_block = tl.where(is_next, passed, before_block)
            passed += own
        column = block + tl.arange(0, BLOCK)
        x = _load(scores, seen_here, column, columns, temperature, penalty, HAS_PENALTY, IS_GREEDY)
        weight = tl.where(column < last, tl.exp(x - most), 0.0)
        # Sums in parallel are not monotonous to the last bit: a place may fall on a token of probability 0, or behind
        # all tokens of the block.
        is_behind = (before_block + tl.cumsum(weight, 0) > aim) & (weight > 0.0)
        found = tl.min(tl.where(is_behind, column, 2147483647), 0)
        found = tl.minimum(found, tl.max(tl.where(weight > 0.0, column, -1), 0))
    # The scores of a row that is not valid give no place: it gets the token 0.
    found = tl.where(is_valid, found, 0).to(tl.int64)
    token = found
    if IS_SORTED:
        token = tl.where(is_valid, tl.load(tokens + row * columns + found), 0)
    tl.store(counters + row, counter)
    tl.store(drawn + row, token)
    tl.store(valid + row, tl.where(is_valid, tl.load(valid + row), 0))
    if HAS_SEEN:
        tl.debug_barrier()  # all scores were read with what was seen before
        tl.store(seen + row * vocabulary + token, 1)


def token_choice_triton(
    scores: Tensor, counter: Tensor, valid: Tensor, seen: Tensor | None, temperature: float, top_k: int | None,
    top_p: float | None, repetition_penalty: float,
) -> Tensor:  # fmt: skip
    """`token_choice` as one kernel; top_k and top_p sort the scores first, by torch."""
    vocabulary = scores.shape[-1]
    is_sorted = top_k is not None or top_p is not None
    if is_sorted and seen is not None:
        scores = penalize(scores, seen, repetition_penalty)
    rows, tokens = sort_scores(channels_adjacent(scores), top_k, top_p)
    drawn = torch.empty_like(counter)
    columns = rows.shape[-1]
    block = min(BLOCK, next_power_of_2(columns))
    if rows.shape[0]:
        find_launch(
            choose, scores.device, rows.shape[0],
            (columns, vocabulary, rows.stride(0), temperature, 1.0 if top_p is None else top_p, repetition_penalty,
             INCREMENT),
            IS_GREEDY=temperature == 0, IS_SORTED=is_sorted, HAS_TOP_P=top_p is not None,
            HAS_SEEN=seen is not None, HAS_PENALTY=seen is not None and not is_sorted, BLOCK=block,
            **launch_options(min(max(block // WARP, 1), WARPS)),
        )(
            rows, tokens, None if seen is None else seen.view(torch.uint8), counter, valid.view(torch.uint8), drawn,
        )  # fmt: skip
    return drawn
