"""Work on batches in threads of the training process, ahead of the step that needs them."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

THREAD = "prefetch"
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

Given = TypeVar("Given")
Made = TypeVar("Made")


def separate_queues() -> None:
    """Give each CUDA stream a queue of the device of its own, as far as there are: 32. A chosen number stays.

    By default streams share 8 queues, and the work of one may wait until that of another is done. A thread that decodes
    images then waits for whole steps, if these are recorded graphs. CUDA reads the variable when it starts.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault(_QUEUES, "32")


class _ShortTurns:
    """While it is entered, a thread that waits for Python's lock gets it after half a millisecond.

    By default it is five. A step of many small kernels takes as long, and a thread that decodes images asks for the
    lock many times a batch. The interval is the process's: it comes back when nobody is left inside.
    """

    _SECONDS = 0.0005

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, self._SECONDS))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._before)


_short_turns = _ShortTurns()


class _Ready(NamedTuple):
    item: Any
    event: torch.cuda.Event | None


class _End(NamedTuple):
    error: BaseException | None


class Prefetch(Generic[Given, Made]):
    """Maps an iterator to the one that `work` makes of it, which a thread runs through ahead of the consumer.

    At most `ahead` items are ready or in the making before they are asked for. On a CUDA device the thread has a stream
    of its own, which the consumer's stream waits for, and Python's threads take short turns. `tensors` returns every
    tensor of an item that may lie on the device. An error in the thread, or in the iterator, is raised where the item
    is asked for. A consumer that stops early ends the thread, and the thread closes the iterator if it is a generator,
    as that of another `Prefetch` is.
    """

    def __init__(
        self,
        work: Callable[[Iterator[Given]], Iterator[Made]],
        device: torch.device,
        *,
        ahead: int,
        tensors: Callable[[Made], Iterable[Tensor]],
    ) -> None:
        self.work, self.device, self.ahead, self.tensors = work, device, ahead, tensors

    def __call__(self, items: Iterator[Given]) -> Iterator[Made]:
        ready: queue.SimpleQueue[_Ready | _End] = queue.SimpleQueue()
        # The thread makes its first item without a place, and takes a place before each other one.
        places, stopped = threading.Semaphore(self.ahead - 1), threading.Event()
        options: Any = {"args": (items, ready, places, stopped), "name": THREAD, "daemon": True}
        thread = threading.Thread(target=self._produce, **options)
        with _short_turns if self.device.type == "cuda" else nullcontext():
            thread.start()
            try:
                while not isinstance(one := ready.get(), _End):
                    places.release()
                    yield self._receive(one)
                if one.error is not None:
                    raise one.error
            finally:
                stopped.set()
                places.release()
                thread.join()

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        # One stream for all epochs, because the allocator keeps the memory of each stream apart. Of high priority, so
        # that its many small kernels need not wait behind the large ones of the step.
        return torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

    def _produce(
        self,
        items: Iterator[Given],
        ready: queue.SimpleQueue[_Ready | _End],
        places: threading.Semaphore,
        stopped: threading.Event,
    ) -> None:
        end = _End(None)
        try:
            stream = self._stream
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                for item in self.work(items):
                    ready.put(_Ready(item, None if stream is None else stream.record_event()))
                    places.acquire()
                    if stopped.is_set():
                        break
        except BaseException as error:
            end = _End(error)
        ready.put(end)
        if isinstance(items, Generator):
            items.close()

    def _receive(self, one: _Ready) -> Made:
        if one.event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(one.event)
            for tensor in self.tensors(one.item):
                if tensor.is_cuda:  # its memory is in use until this stream, too, is done with it
                    tensor.record_stream(stream)
        return one.item
