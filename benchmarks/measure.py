"""Times, memory and CUDA graphs of functions without arguments."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longseq.kernels.devices import side_stream
from longseq.kernels.self_test import CACHE_VARIABLE

Run = Callable[[], Any]

ROUNDS = 2  # every function is measured in turn, so often, against clocks that drift
FEWEST, MOST = 3, 100  # timed calls in a round
CACHE_BYTES = 256 * 2**20  # more than the second-level cache of any GPU


class Times(NamedTuple):
    """Milliseconds of a call: the median, and the quantiles 0.2 and 0.8."""

    median: float
    low: float
    high: float


class Outcome(NamedTuple):
    """Times, or the reason why there are none, in one line."""

    times: Times | None
    failure: str | None = None


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache", type=Path, help="a folder that keeps compiled kernels; first calls are then not timed"
    )


@contextmanager
def compiled_kernels(folder: Path | None) -> Iterator[None]:
    """Within the block, compiled kernels are read from `folder` and kept there; None: there are none at its start."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", CACHE_VARIABLE):
            os.environ[name] = f"{folder or empty}/{name}"
        yield


def one_line(error: BaseException) -> str:
    """An error's text for a cell of a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_in_turn(runs: Mapping[str, Run], device: torch.device, seconds: float) -> dict[str, Outcome]:
    """Time functions in turn, each for about `seconds` in all. A function that fails does not stop the others."""
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
    """Milliseconds of each call within `seconds`, after two calls that are not counted."""
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
    """Seconds of one call, the first one, including compilation."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def added_bytes(run: Run, device: torch.device) -> int:
    """The most GPU memory that a call allocates beyond the memory in use before it.

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
    """The replay of a function's CUDA graph. Raises RuntimeError for functions that cannot be captured."""
    with torch.cuda.device(device):
        stream = side_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        # By default, torch.cuda.graph uses a stream of the device on which the first graph was captured. If capturing
        # fails, torch up to 2.15 at least leaves that stream current.
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
