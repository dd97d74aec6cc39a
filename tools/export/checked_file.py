"""Writing a file, and giving it its name only if it agrees with the model that it was written from."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from longseq.blocks.convolution import ShortConvolution
from longseq.files import sha256
from longseq.mixers import Mixer
from longseq.tools.export.formats import FORMATS
from longseq.tools.export.parity import Comparison, latency_ms
from longseq.tools.export.report import ExportReport
from longseq.tools.export.spec import FileSpec

# An axis of size 1 would be traced as a constant.
TRACED_BATCH = 2


def float_copy(model: nn.Module) -> Any:
    """A float32 copy on the CPU with the operations' exportable backend and without gradient checkpointing."""
    duplicate = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    disable_checkpointing = getattr(duplicate, "set_grad_checkpointing", None)
    if callable(disable_checkpointing):
        disable_checkpointing(False)
    for module in duplicate.modules():
        if isinstance(module, (Mixer, ShortConvolution)):
            module.backend = "torch"
    return duplicate


def probabilities(logits: Tensor, *, multi_label: bool) -> Tensor:
    """Probabilities of classes, which add up to 1; with `multi_label` each class has its own."""
    return logits.sigmoid() if multi_label else logits.softmax(-1)


def tokens_of(tokens: Tensor, vocab_size: int) -> Tensor:
    """The tokens, with `vocab_size` in place of negative numbers: ONNX would read -1 as the last token."""
    return torch.where(tokens < 0, vocab_size, tokens)


@torch.no_grad()
def readable(module: nn.Module, candidates: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The arguments that the model itself reads: some models of timm take no empty batch, or no small image."""
    read = []
    for arguments in candidates:
        try:
            results = tree_leaves(module(*arguments))
        except (AssertionError, RuntimeError, ValueError, ZeroDivisionError, IndexError, TypeError):
            continue
        if all(result.isfinite().all() for result in results):
            read.append(arguments)
    return read


def no_rows(module: nn.Module, example: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments `example` with an empty batch, if the model itself reads them."""
    return readable(module, [tree_map(lambda tensor: tensor[:0], example)])


def write_checked(
    module: nn.Module,
    example: tuple[Any, ...],
    target: Path,
    spec: FileSpec,
    *,
    format: str,
    compare: Callable[[Callable[..., Any]], list[Comparison]],
    unit: str,
    timed: tuple[Any, ...] | None,
) -> ExportReport:
    """Write `module` to `target`, after `compare` has found the file equal to the model, and its metadata beside it.

    Args:
        module: traced with the arguments `example`.
        compare: compares the file, as a function, with the model.
        unit: what a batch holds: image, token or document.
        timed: the arguments of a call that is timed in the module and in the file; None: nothing is timed.

    Raises:
        ValueError: the file differs from the model. An existing `target` then remains as it is.
    """
    started = time.perf_counter()
    # Before a runtime is loaded: its idle threads slow down the rest of the process.
    model_ms = None if timed is None else latency_ms(module, *timed)
    file_ms = None
    target.parent.mkdir(parents=True, exist_ok=True)
    # A folder, because an ONNX file knows the file with its weights by its final name.
    with tempfile.TemporaryDirectory(prefix=".partial.", dir=target.parent) as folder:
        partial = Path(folder, target.name)
        with quiet():
            metadata = {**spec.metadata, **(FORMATS[format].write(module, example, partial, spec) or {})}
            call = FORMATS[format].open_file(partial)
            comparisons = compare(call)
            if timed is not None:
                file_ms = latency_ms(call, *timed)
        for row in comparisons:
            if not row.passed:
                raise ValueError(
                    f"for {unit}s {list(row.shape)} the {format} file differs from the model by {row.difference:.1e}, "
                    f"more than {row.limit:.1e}"
                )
        written = sorted(Path(folder).iterdir())
        size = sum(path.stat().st_size for path in written)
        facts = {"file": target.name, "sha256": sha256(partial), **metadata}
        described = Path(folder, f"{target.name}.json")
        described.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for path in (*written, described):
            os.replace(path, target.with_name(path.name))
    return ExportReport(
        path=target,
        beside=[target.with_name(path.name) for path in written if path != partial],
        format=format,
        unit=unit,
        seconds=time.perf_counter() - started,
        size=size,
        comparisons=comparisons,
        metadata=metadata,
        model_ms=model_ms,
        file_ms=file_ms,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters, which print and warn about their own internals; exceptions are raised."""
    previous = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(previous)
