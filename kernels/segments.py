"""Where long sequences with few heads are cut in time, so that more of a GPU reads them at once."""

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
    """How long the segments are that sequences of `length` are cut into, both in chunks or in tokens; 0: none are cut.

    `walkers` programs walk along the uncut sequences, and a GPU runs `programs` of them side by side. Cut, all segments
    are walked along at once, and every segment once more before, to find what it does to a state. That is not won back
    by fewer segments than `fewest`, nor by shorter ones than `shortest`, nor in sequences shorter than `least`.

    With `at_once` no program waits for its turn. Without it there are about `programs`, and the span is a power of two.
    By comparisons: sizes may be symbols of torch.compile.
    """
    if programs < fewest * walkers or length < least:
        return 0
    if at_once:
        return max(shortest, cdiv(length, programs // walkers))
    span = max(shortest, next_power_of_2(cdiv(length * walkers, programs)))
    return span if length >= fewest * span else 0
