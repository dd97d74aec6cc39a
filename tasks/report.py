"""What the commands print: warnings, tables, and each task's report of a run."""

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import Progress

# Warnings that need no action: data.num_workers is chosen on purpose, resumed runs write to their own folder, short
# epochs log less often, and damaged EXIF data leaves an image unchanged.
UNWANTED = (
    ".*does not have many workers.*",
    ".*`IterableDataset` has `__len__` defined.*",  # the length of a stream counts the samples of all its workers
    ".*exists and is not empty.*",
    ".*smaller than the logging interval.*",
    ".*Checkpoint directory.*",
    ".*The dirpath has changed from.*",
    ".*LeafSpec.*",
    "(?s).*Corrupt EXIF data.*",
    ".*returned a view tensor. An in-place op on this view.*",  # torch's fully_shard: nothing changes logits in place
    "The AccumulateGrad node's stream does not match.*",  # Lightning makes torch's DDP in a CUDA stream of its own
)

EACH = {"of_each_process": True}  # `extra` of a record that processes do not have in common
_KERNELS = "longseq.kernels"  # the parent of the kernels' loggers

_log = logging.getLogger(__name__)


class Report:
    """What a task prints and records at the end of a run; a task overrides what it adds.

    `headline` names the metrics of the closing table, in its order.
    """

    headline: ClassVar[tuple[str, ...]] = ("loss",)

    def extras(self, module: Any, info: Any, split: str) -> dict[str, Any]:
        """More entries of metrics.json after `module` was evaluated on `split`, as values of JSON."""
        return {}

    def counts(self, module: Any, info: Any, split: str) -> dict[str, int]:
        """The numbers of samples of an evaluation, printed and written with its metrics."""
        return {}

    def closing(self, module: Any, info: Any) -> str | None:
        """A line that a run prints below the closing table; None for no line."""
        return None

    def next_commands(self, checkpoint: str) -> list[str]:
        """Commands to try next, printed below the closing table. `checkpoint` is the word `checkpoint=FILE`."""
        return [f"longseq evaluate {checkpoint}"]


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show only warnings that a user can act on: our own, one line each, and few of other packages.

    Kernels also report when a GPU's first call compiles them and compares them with float64, in 10 to 22 seconds.
    """
    package = logging.getLogger("longseq")
    added = [] if any(isinstance(handler, _Lines) for handler in package.handlers) else [_Lines()]
    shown = {
        _KERNELS: logging.INFO,
        __name__: logging.INFO,
        "lightning.pytorch": logging.WARNING,
        "lightning.fabric": logging.WARNING,
        "timm.data.readers.reader_wds": logging.ERROR,  # it warns of a missing file that shards do not need
    }
    levels = {name: logging.getLogger(name).level for name in shown}
    with warnings.catch_warnings():
        for message in UNWANTED:
            warnings.filterwarnings("ignore", message)
        for name, level in shown.items():
            logging.getLogger(name).setLevel(level)
        for handler in added:
            package.addHandler(handler)
        try:
            yield
        finally:
            for handler in added:
                package.removeHandler(handler)
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


class _Lines(logging.Handler):
    """Writes warnings, long steps and the kernels' reports of the first process to stderr, and with `EACH` of all."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name.startswith((f"{_KERNELS}.", __name__))

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(rank_zero_only, "rank", 0) and not hasattr(record, "of_each_process"):
            return
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(f"longseq: {kind}{' '.join(record.getMessage().split())}", file=sys.stderr)


@contextmanager
def long_step(description: str) -> Iterator[None]:
    """Log the description if the block takes more than a second; commands also print it to stderr."""
    timer = threading.Timer(1.0, _log.info, [description])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, elsewhere a line (see `long_step`); yields a function that advances it."""
    console = Console(stderr=True)
    if not console.is_terminal:  # below 14.3, a disabled Progress of rich writes an empty line at its end
        with long_step(description):
            yield lambda steps: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)


def shorten(path: str | Path) -> str:
    """A path relative to the working directory, if it is below it."""
    absolute, here = Path(path).resolve(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else path)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table without borders. Long commands stay on one line, so that they can be copied."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
