"""Answers to signals for the time of a block."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def answered(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Answer signals by `handler` while the block runs; only the main thread can, and others leave them alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
