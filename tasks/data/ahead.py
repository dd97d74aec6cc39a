"""Work on batches in a thread of the training process, ahead of the step that needs them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Given = TypeVar("Given")
Made = TypeVar("Made")


def work_ahead(
    items: Iterator[Given], work: Callable[[Given], Made], device: torch.device, *, ahead: int = 4
) -> Iterator[Made]:
    """Yields `work(item)` of each item; a thread prepares up to `ahead` of them on a CUDA stream of its own.

    The consumer's stream waits for the thread's. An error in the thread is raised where the item is asked for, and the
    thread ends with its consumer.
    """
    ready: queue.SimpleQueue[tuple[Made, torch.cuda.Event] | BaseException | None] = queue.SimpleQueue()
    places, stopped = threading.Semaphore(ahead), threading.Event()
    # Of high priority: its many small kernels do not queue behind the large ones of the step.
    stream = torch.cuda.Stream(device, priority=-1)

    def produce() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for item in items:
                    made = work(item)
                    ready.put((made, stream.record_event()))
                    places.acquire()
                    if stopped.is_set():
                        return
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=produce, name="work_ahead", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            made, event = found
            places.release()
            torch.cuda.current_stream(device).wait_event(event)
            for tensor in made if isinstance(made, tuple) else ():
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(device))  # keeps its memory until the step is done
            yield made
    finally:
        stopped.set()
        places.release()
        thread.join()
