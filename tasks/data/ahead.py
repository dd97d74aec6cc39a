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
    items: Iterator[Given], work: Callable[[Given], Made], stream: torch.cuda.Stream, *, ahead: int
) -> Iterator[Made]:
    """Yields `work(item)` of each item; a thread prepares up to `ahead` of them on a CUDA stream.

    The consumer's stream waits for it. An error in the thread is raised where the item is asked for. The thread ends
    with its consumer, and closes `items`, which may be those of another thread on the same stream.
    """
    ready: queue.SimpleQueue[tuple[Made, torch.cuda.Event] | BaseException | None] = queue.SimpleQueue()
    places, stopped = threading.Semaphore(ahead), threading.Event()

    def produce() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for item in items:
                    made = work(item)
                    ready.put((made, stream.record_event()))
                    places.acquire()
                    if stopped.is_set():
                        break
            ready.put(None)
        except BaseException as error:
            ready.put(error)
        finally:
            if hasattr(items, "close"):
                items.close()

    thread = threading.Thread(target=produce, name="work_ahead", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            made, event = found
            places.release()
            own = torch.cuda.current_stream(stream.device)
            if own != stream:
                own.wait_event(event)
                for tensor in made if isinstance(made, tuple) else ():
                    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                        tensor.record_stream(own)  # keeps its memory until the step is done
            yield made
    finally:
        stopped.set()
        places.release()
        thread.join()
