"""Triton kernels compiled side by side, before they are launched.

Triton compiles each kernel at its first launch, one after the other. Only the reading of the Python source holds the
interpreter's lock. The passes of the compiler, ptxas and the C compiler of launchers can run in several threads.

Triton up to 3.6 loads every launcher as a module of the same name. When a launcher is loaded a second time, Python
copies it into the module that has the name: that of another thread, perhaps, which has not read its own launcher yet
and would run its kernel with the wrong one. So threads only fill Triton's cache, and one thread then loads from it.
"""

import copy
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

MOST_THREADS = 16

_LOCK = threading.Lock()


@contextmanager
def find_kernels(found: dict[Any, tuple[Any, str]]) -> Iterator[None]:
    """Skip this thread's launches of kernels that are not compiled yet, and note them for `compile_kernels`.

    Results computed inside are meaningless: a whole forward and backward pass inside serves to find its kernels. Other
    threads launch as usual. If another thread is inside such a context, this one does nothing.
    """
    from triton import knobs

    if not _LOCK.acquire(blocking=False):
        yield
        return
    inside, before = threading.get_ident(), knobs.runtime.jit_cache_hook

    def leave_out(**launch: Any) -> bool | None:
        """Return True to Triton, which calls this before it compiles: this launch is compiled later."""
        if threading.get_ident() != inside:
            return None if before is None else before(**launch)
        kernel, compilation = launch["fn"].jit_function, launch["compile"]
        found[kernel, compilation["key"]] = kernel, compilation["specialization_data"]
        return True

    try:
        knobs.runtime.jit_cache_hook = leave_out
        with torch.autograd.set_multithreading_enabled(False):  # a backward pass runs in this thread as well
            yield
    finally:
        knobs.runtime.jit_cache_hook = before
        _LOCK.release()


def compile_kernels(found: dict[Any, tuple[Any, str]], device: torch.device) -> None:
    """Compile kernels in several threads. A kernel that does not compile is left out: its launch raises the error."""
    with ThreadPoolExecutor(_count_threads(), "longseq compilation") as pool:
        compiled = list(pool.map(partial(_compile, device), found.values()))
    for one in compiled:
        with suppress(Exception):
            one.run  # noqa: B018


def _compile(device: torch.device, launch: tuple[Any, str]) -> Any:
    """Compile a kernel and its launcher; None if that fails."""
    kernel, specialization = launch
    with suppress(Exception):
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for this thread
        compiled = kernel.preload(specialization)
        copy.copy(compiled).run  # noqa: B018  reading the attribute builds the launcher with a C compiler, and loads both
        return compiled
    return None


def _count_threads() -> int:
    """Count the processors that this rank may use: ranks of one host share them.

    Lightning sets WORLD_SIZE, of all hosts, and not LOCAL_WORLD_SIZE.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, processors // ranks))
