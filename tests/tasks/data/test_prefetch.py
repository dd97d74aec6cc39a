"""Threads that work ahead: the items and their order, how far ahead, errors, and the end of the threads."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from functools import partial

import pytest
import torch
from cases import cases

from longseq.tasks.data.prefetch import THREAD, Prefetch, _short_turns


def count_threads():
    return sum(thread.name == THREAD for thread in threading.enumerate())


def prefetch(work, ahead=1):
    return Prefetch(work, torch.device("cpu"), ahead=ahead, tensors=lambda item: [])


def two_stages(first, second, aheads=(1, 1)):
    one, other = (prefetch(work, ahead) for work, ahead in zip((first, second), aheads, strict=True))
    return lambda items: other(one(items))


def pairs(items):
    """A work that gives fewer items than it takes."""
    while given := tuple(itertools.islice(items, 2)):
        yield given


def squares(items):
    for item in items:
        yield [value * value for value in item]


@cases("aheads", [(1, 1), (2, 1), (1, 6), (50, 50)])
@cases("count", [0, 1, 7, 20])
def test_two_stages_give_what_one_loop_gives(count, aheads):
    stages = two_stages(pairs, squares, aheads)
    for _ in range(2):  # as many epochs
        assert list(stages(iter(range(count)))) == list(squares(pairs(iter(range(count)))))
        assert count_threads() == 0


def test_both_stages_work_at_a_time():
    met = threading.Barrier(2)

    def meet_at(place, items):
        for item in items:
            if item == place:
                met.wait(10)
            yield item

    stages = two_stages(partial(meet_at, 1), partial(meet_at, 0))
    assert list(stages(iter(range(3)))) == [0, 1, 2]


@cases(("aheads", "most"), [((1, 1), 3), ((3, 1), 5), ((1, 4), 6)])
def test_the_stages_run_ahead_as_far_as_they_may(aheads, most):
    begun, reached = [], threading.Semaphore(0)

    def begin(items):
        for item in items:
            begun.append(item)
            reached.release()
            yield item

    found = two_stages(begin, iter, aheads)(iter(range(100)))
    assert next(found) == 0
    for _ in range(most):
        assert reached.acquire(timeout=10)
    time.sleep(0.05)  # another item would be begun meanwhile
    assert len(begun) == most
    found.close()
    assert count_threads() == 0


def fail_at(place, items):
    for item in items:
        if item == place:
            raise ValueError(f"no item {place}")
        yield item


@cases("failing", ["items", "first", "second"])
@cases("aheads", [(1, 1), (1, 6), (6, 1)])
def test_an_error_is_raised_where_its_item_is_asked_for(failing, aheads):
    works = {name: partial(fail_at, 3) if name == failing else iter for name in ("items", "first", "second")}
    found = []
    with pytest.raises(ValueError, match="no item 3"):
        found.extend(two_stages(works["first"], works["second"], aheads)(works["items"](iter(range(9)))))
    assert found == [0, 1, 2]
    assert count_threads() == 0


@cases("taken", [0, 1, 5])
@cases("aheads", [(1, 1), (1, 6), (6, 1)])
def test_a_consumer_that_stops_early_ends_both_threads(taken, aheads):
    closed = []

    def count_until_closed():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    items = count_until_closed()
    found = two_stages(iter, iter, aheads)(items)
    for number in range(taken):
        assert next(found) == number
        assert count_threads() == 2
    found.close()
    assert count_threads() == 0
    assert bool(closed) == bool(taken)  # nothing begins before the first item is asked for


def test_the_work_needs_no_gradients():
    def double(items):
        for item in items:
            yield 2 * item

    weights = torch.ones(2, requires_grad=True)
    (found,) = prefetch(double)(iter([weights]))
    assert not found.requires_grad


def test_short_turns_last_until_the_last_one_leaves():
    before = sys.getswitchinterval()
    with _short_turns:
        with _short_turns:
            assert sys.getswitchinterval() == pytest.approx(0.0005)
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == before


@pytest.mark.gpu
def test_streams_wait_for_each_other_and_memory_that_they_read_is_not_given_out():
    device, late = torch.device("cuda", torch.cuda.current_device()), 1_000_000  # cycles

    def make(numbers):
        for number in numbers:
            torch.cuda._sleep(late)
            yield [torch.full((1 << 20,), number, device=device) for _ in range(3)]

    def add(items):
        for parts in items:
            torch.cuda._sleep(late)
            yield torch.stack(parts).sum(0)

    made = Prefetch(make, device, ahead=1, tensors=lambda parts: parts)
    added = Prefetch(add, device, ahead=6, tensors=lambda total: [total])
    right = []
    for number, total in enumerate(added(made(iter(range(50))))):
        torch.cuda._sleep(late)
        right.append((total == 3 * number).all())
    assert len(right) == 50
    assert all(torch.stack(right).tolist())
