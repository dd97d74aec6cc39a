"""The processes that score and continue texts for lm-evaluation-harness: this one, or one for each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from longseq import plugins
from longseq.tasks.commands import Generate
from longseq.tasks.generate import TASKS
from longseq.tasks.lm.likelihood import Likelihood, Row, score_rows
from longseq.tasks.lm.writer import Writer
from longseq.tasks.report import progress_bar
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.training import checkpoint

Item = TypeVar("Item")


class Worker:
    """A model on a device, and its tokenizer."""

    def __init__(self, path: str, device: str, *, weights: str, dtype: str) -> None:
        loaded = checkpoint.load(path, weights=weights, map_location=device, tasks=TASKS)
        self.model: Any = loaded.backbone.to(getattr(torch, dtype)).eval()
        self.tokenizer = TextInfo.from_dict(loaded.data).make_tokenizer()

    def score(self, rows: Sequence[Row]) -> list[Likelihood]:
        """The likelihoods of rows, read in one batch."""
        return score_rows(self.model, rows)

    def write(self, numbered: Sequence[tuple[int, str]], options: dict[str, Any]) -> list[str]:
        """The continuations of prompts, in one batch; `options` are keys of `longseq generate`.

        Each prompt comes with its number among all prompts, which seeds its draws.
        """
        keys = Generate(checkpoint="", prompt="", batch_size=len(numbered), **options)
        numbers, prompts = zip(*numbered, strict=True)
        writer = Writer(self.model, self.tokenizer, keys, cut_prompts=True)
        return [written.text for written in writer.write(prompts, numbers=numbers)]


class Workers:
    """A worker on each of `devices`: one in this process, or several in processes of their own.

    `first` is the worker of this process. With several devices it is on the CPU and not used for batches. `modules`
    are the plug-ins that the other processes load.
    """

    def __init__(
        self, path: str, devices: Sequence[str], *, weights: str, dtype: str, batch_size: int, modules: Sequence[str]
    ) -> None:
        self.batch_size, self.dtype = batch_size, dtype
        self.first = Worker(path, devices[0] if len(devices) == 1 else "cpu", weights=weights, dtype=dtype)
        self._executor: ProcessPoolExecutor | None = None
        if len(devices) == 1:
            return
        # New processes, because a fork cannot use a GPU that this process has touched.
        context = get_context("spawn")
        waiting = context.Queue()
        for device in devices:
            waiting.put(device)
        arguments = (waiting, path, weights, dtype, list(modules))
        self._executor = ProcessPoolExecutor(len(devices), context, _start, arguments)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def score(self, rows: Sequence[Row]) -> list[Likelihood]:
        """The likelihood of each row."""
        return self._run("score", "scoring", rows, lambda row: len(row.tokens))

    def write(self, prompts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """The continuation of each prompt."""
        return self._run("write", "writing", list(enumerate(prompts)), lambda one: len(one[1]), options)

    def _run(
        self, name: str, description: str, items: Sequence[Item], size: Callable[[Item], int], *options: Any
    ) -> list[Any]:
        """The results of items in batches of similar sizes, the largest first, in the order of the items."""
        order = sorted(range(len(items)), key=lambda index: -size(items[index]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        chosen = [[items[index] for index in batch] for batch in batches]
        if self._executor is None:
            results: Iterator[list[Any]] = (getattr(self.first, name)(batch, *options) for batch in chosen)
        else:
            results = self._executor.map(partial(_call, name, options), chosen)
        found: dict[int, Any] = {}
        with progress_bar(description, len(items)) as advance:
            for batch, answers in zip(batches, results, strict=True):
                found |= dict(zip(batch, answers, strict=True))
                advance(len(batch))
        return [found[index] for index in range(len(items))]


_worker: Worker | None = None  # of a process that `Workers` has started


def _start(waiting: Any, path: str, weights: str, dtype: str, modules: Sequence[str]) -> None:
    global _worker
    plugins.load(modules)
    _worker = Worker(path, waiting.get(), weights=weights, dtype=dtype)


def _call(name: str, options: tuple[Any, ...], batch: Sequence[Any]) -> list[Any]:
    return getattr(_worker, name)(batch, *options)
