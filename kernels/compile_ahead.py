"""Triton kernels compiled side by side, before they are launched.

Triton compiles a kernel when it is first launched, one after the other. But for the reading of its Python source, a
compilation holds no lock of the interpreter: passes, ptxas and the C compiler of launchers run in as many threads as
there are processors.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

MOST_THREADS = 16

_LOCK = threading.Lock()


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Leave out this thread's launches of kernels that are not compiled yet, and compile those at the end.

    What runs inside computes nothing of use: it may be a whole forward and backward pass, of which all kernels are
    found although none has a result. What does not compile is left to the launch that needs it, and says why there.
    Other threads launch as ever; while one of them is inside, this context does nothing.
    """
    from triton import knobs

    if not _LOCK.acquire(blocking=False):
        yield
        return
    inside, before = threading.get_ident(), knobs.runtime.jit_cache_hook
    found: dict[Any, tuple[Any, str]] = {}

    def leave_out(**launch: Any) -> bool | None:
        """Triton's question before a compilation, whether the launch is somebody else's: True."""
        if threading.get_ident() != inside:
            return None if before is None else before(**launch)
        kernel, compilation = launch["fn"].jit_function, launch["compile"]
        found[kernel, compilation["key"]] = kernel, compilation["specialization_data"]
        return True

    try:
        knobs.runtime.jit_cache_hook = leave_out
        try:
            with torch.autograd.set_multithreading_enabled(False):  # a backward pass runs in this thread as well
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
        # Not begun before, when its threads would hold up this one.
        with ThreadPoolExecutor(_count_threads(), "longseq compilation") as pool:
            for kernel, specialization in found.values():
                pool.submit(_compile, kernel, specialization, device)
    finally:
        _LOCK.release()


def _compile(kernel: Any, specialization: str, device: torch.device) -> None:
    with suppress(Exception):
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        # The attribute makes the launcher, for which Triton runs a C compiler, and loads the kernel.
        kernel.preload(specialization).run  # noqa: B018


def _count_threads() -> int:
    """Processors of this process, which ranks of one host share; Lightning tells the ranks of all hosts alone."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, processors // ranks))
