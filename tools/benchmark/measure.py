"""Times, memory and CUDA graphs of functions without arguments."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Run = Callable[[], Any]

ROUNDS = 2  # of taking turns, against clocks that drift
FEWEST, MOST = 3, 100  # calls that are timed in a round
CACHE_BYTES = 256 * 2**20  # more than any GPU's second-level cache


class Times(NamedTuple):
    """Milliseconds of a call: the median, and the quantiles 0.2 and 0.8."""

    median: float
    low: float
    high: float


class Outcome(NamedTuple):
    """Times, or in one line why there are none."""

    times: Times | None
    failure: str | None = None


def one_line(error: BaseException) -> str:
    """An error as a cell of a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 160 else f"{text[:157]}..."


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU; on a CPU there is none to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_in_turn(runs: Mapping[str, Run], device: torch.device, seconds: float) -> dict[str, Outcome]:
    """Time functions in turn, each for about so many seconds in all. One that fails does not end the others."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    failures: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            if name in failures:
                continue
            try:
                samples[name] += _time(run, device, seconds / ROUNDS)
            except Exception as error:
                failures[name] = one_line(error)
    return {
        name: Outcome(None, failures[name]) if name in failures else Outcome(_summarise(samples[name])) for name in runs
    }


def _summarise(samples: list[float]) -> Times:
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Times(statistics.median(samples), fifths[0], fifths[3])


def _time(run: Run, device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of each of the calls that fit into the seconds, after two that are not counted."""
    run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    count = int(seconds / max(time.perf_counter() - start, 1e-9))
    count = min(max(count, FEWEST), MOST)
    return _time_on_gpu(run, device, count) if device.type == "cuda" else [_time_on_host(run) for _ in range(count)]


def _time_on_host(run: Run) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _time_on_gpu(run: Run, device: torch.device, count: int) -> list[float]:
    with torch.cuda.device(device):
        cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            cache.zero_()  # so that no call finds its inputs in the cache
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def time_once(run: Run, device: torch.device) -> float:
    """Seconds of one call: of the first one, with whatever it compiles."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def added_bytes(run: Run, device: torch.device) -> int:
    """Return the most memory of a GPU that a call allocates beyond what was there before.

    The function is called once before, so that workspaces of libraries and buffers of autotuning do not count.
    """
    run()
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def capture(run: Run, device: torch.device) -> Run:
    """A CUDA graph of a function: what replays it. Raises RuntimeError for functions that no graph can hold."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Left to itself, torch.cuda.graph takes a stream of the device that first captured a graph, and before torch
        # 2.15 at least it leaves that stream the current one where capturing fails.
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                kept = run()
        torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Any:
        graph.replay()
        return kept

    return replay
