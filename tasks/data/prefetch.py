"""Work on batches in a thread of the training process, ahead of the step that needs them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longseq.tasks.data.batch import Batch

THREAD = "prefetch"
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_AHEAD = 2  # groups of batches that are finished before they are asked for


def separate_queues() -> None:
    """Give each CUDA stream a queue of the device of its own, as far as there are: 32. A chosen number stays.

    By default streams share 8 queues, and the work of one may wait until that of another is done. A thread that decodes
    images then waits for whole steps, if these are recorded graphs. CUDA reads the variable when it starts.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault(_QUEUES, "32")


class _Made(NamedTuple):
    batch: Batch
    event: torch.cuda.Event | None


class _End(NamedTuple):
    error: BaseException | None


class Prefetch:
    """Maps an iterator of batches to that of what `work` makes of them, in their order, `group` batches at a time.

    It is at most two groups ahead. `work` runs in a thread, on a CUDA device on a stream of its own, which the
    consumer's stream waits for. Its batches have tensors as inputs and targets. An error in the thread, or in the
    iterator, is raised where the batch is asked for. A consumer that stops early ends the thread.
    """

    def __init__(
        self, work: Callable[[Sequence[Batch]], Sequence[Batch]], device: torch.device, *, group: int = 1
    ) -> None:
        self.work, self.device, self.group = work, device, group

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        made: queue.SimpleQueue[_Made | _End] = queue.SimpleQueue()
        places, stopped = threading.Semaphore(_AHEAD * self.group), threading.Event()
        options: Any = {"args": (batches, made, places, stopped), "name": THREAD, "daemon": True}
        thread = threading.Thread(target=self._produce, **options)
        thread.start()
        try:
            while not isinstance(item := made.get(), _End):
                places.release()
                yield self._receive(item)
            if item.error is not None:
                raise item.error
        finally:
            stopped.set()
            places.release(self.group)
            thread.join()

    def _produce(
        self,
        batches: Iterator[Batch],
        made: queue.SimpleQueue[_Made | _End],
        places: threading.Semaphore,
        stopped: threading.Event,
    ) -> None:
        on_gpu = self.device.type == "cuda"
        try:
            # Of high priority, so that its many small kernels need not wait behind the large ones of the step.
            stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
            with torch.no_grad(), torch.cuda.stream(stream) if on_gpu else nullcontext():
                while not stopped.is_set():
                    for _ in range(self.group):
                        places.acquire()
                    given = [] if stopped.is_set() else list(islice(batches, self.group))
                    if not given:
                        break
                    finished = self.work(given)
                    event = None if stream is None else stream.record_event()
                    for batch in finished:
                        made.put(_Made(batch, event))
            made.put(_End(None))
        except BaseException as error:
            made.put(_End(error))

    def _receive(self, item: _Made) -> Batch:
        if item.event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(item.event)
            for value in item.batch[:2]:
                _keep_for(value, stream)
        return item.batch


def _keep_for(value: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a tensor of another stream is in use until this stream is done with it."""
    if isinstance(value, Tensor) and value.is_cuda:
        value.record_stream(stream)
