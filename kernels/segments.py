"""The cutting of long sequences with few heads into segments of time, so that more programs of a GPU work on them."""

from longseq.kernels.triton_launch import cdiv, next_power_of_2


def find_span(
    length: int,
    walkers: int,
    programs: int,
    *,
    fewest: int,
    shortest: int,
    least: int = 0,
    at_once: bool = True,
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
