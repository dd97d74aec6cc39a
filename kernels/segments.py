"""The cutting of long sequences with few heads into segments of time, so that more programs of a GPU work on them."""

import math

from longseq.kernels.triton_launch import cdiv, next_power_of_2

FEWEST_SEGMENTS = 3  # fewer do not make up for walking most of the sequence again
FEWEST_CHUNKS = 64  # of a sequence that is cut
SHORTEST_SEGMENT = 4  # chunks


def find_span(
    length: int, walkers: int, programs: int, *, fewest: int, shortest: int, least: int = 0, at_once: bool = True
) -> int:
    """Return the length of a segment, in the unit of `length` (chunks or tokens); 0 where sequences are not cut.

    Without cuts each of `walkers` programs reads one sequence of one head, and a GPU runs `programs` of them side by
    side. With cuts one program reads each segment, after a first pass that reads each segment to find its effect on a
    state. That pass does not pay with fewer than `fewest` segments, with segments shorter than `shortest`, or with
    sequences shorter than `least`.

    With `at_once` all programs of the cut sequences run side by side. Without it there are about `programs` of them,
    and the length of a segment is a power of two. Only comparisons decide, because sizes can be symbols of
    torch.compile.
    """
    if programs < fewest * walkers or length < least:
        return 0
    if at_once:
        return max(shortest, cdiv(length, programs // walkers))
    span = max(shortest, next_power_of_2(cdiv(length * walkers, programs)))
    return span if length >= fewest * span else 0


def find_walk_span(chunks: int, lanes: int, batch: int, sequences: int, programs: int) -> int:
    """`find_span` for rows of `chunks` chunks, where `lanes` programs walk through each sequence side by side.

    Packed sequences are cut like the row that holds them, unless there are enough of them.
    """
    if sequences * lanes > programs:
        return 0
    # The segments before each one are composed one by one, which takes about as long as so many chunks.
    shortest = max(SHORTEST_SEGMENT, math.isqrt(chunks // 2))
    return find_span(chunks, batch * lanes, programs, fewest=FEWEST_SEGMENTS, shortest=shortest, least=FEWEST_CHUNKS)
