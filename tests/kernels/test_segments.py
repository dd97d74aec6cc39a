"""Sequences are cut in time only if it pays, and never into more programs than requested."""

from __future__ import annotations

from cases import cases

from longseq.kernels.segments import find_span

LENGTHS = [1, 15, 16, 17, 100, 1000, 1024, 4097]


@cases("length", LENGTHS)
@cases("walkers", [1, 3, 32, 33, 64, 200])
def test_segments_run_side_by_side_and_are_neither_few_nor_short(length, walkers):
    span = find_span(length, walkers, 128, fewest=3, shortest=4, least=16)
    if walkers > 128 // 3 or length < 16:
        assert span == 0
    else:
        segments = -(-length // span)
        assert span >= 4
        assert 3 <= segments <= 128 // walkers
        assert span == 4 or -(-length // (span - 1)) * walkers > 128  # no longer than need be


@cases("length", LENGTHS)
@cases("walkers", [1, 3, 32, 33, 64])
def test_spans_that_a_kernel_is_compiled_for_are_powers_of_two(length, walkers):
    span = find_span(length, walkers, 128, fewest=2, shortest=8, at_once=False)
    assert span & (span - 1) == 0
    if span:
        assert span >= 8
        assert length >= 2 * span
        assert length * walkers <= 128 * span
        assert span == 8 or length * walkers > 128 * span // 2
    else:
        assert length < 16 or walkers > 64 or length * walkers > 128 * (length // 4)


def test_a_gpu_without_room_and_one_program_alone():
    assert find_span(1000, 1, 0, fewest=3, shortest=4) == 0
    assert find_span(1000, 1, 3, fewest=3, shortest=4) == 334
