"""Writing a file, and giving it its name only if it agrees with the model that it was written from."""

from __future__ import annotations

import copy
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from longseq.blocks.convolution import ShortConvolution
from longseq.files import refusal_in
from longseq.mixers import Mixer
from longseq.timm_models import model_name
from longseq.tools.export.formats import FORMATS
from longseq.tools.export.parity import Comparison, latency_ms
from longseq.tools.export.quiet import quiet
from longseq.tools.export.report import ExportReport
from longseq.tools.export.spec import FileSpec

__all__ = ["TRACED_BATCH", "check_batch_sizes", "float_copy", "no_rows", "readable", "write_checked"]

# An axis of size 1 would be traced as a constant.
TRACED_BATCH = 2

# Larger batches show nothing more, and their inputs alone take the memory.
_LARGEST_BATCH = 4096


def float_copy(model: nn.Module) -> nn.Module:
    """A float32 copy on the CPU with the operations' exportable backend and without gradient checkpointing."""
    duplicate = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    disable_checkpointing = getattr(duplicate, "set_grad_checkpointing", None)
    if callable(disable_checkpointing):
        disable_checkpointing(False)
    for module in duplicate.modules():
        if isinstance(module, (Mixer, ShortConvolution)):
            module.backend = "torch"
    return duplicate


def check_batch_sizes(batch_sizes: Sequence[int]) -> None:
    """Raise ValueError unless the sizes can show that the batch of a file is open."""
    if not batch_sizes or TRACED_BATCH in batch_sizes:
        raise ValueError(
            f"batch_sizes={list(batch_sizes)}: name one or more, without {TRACED_BATCH}, which the file is traced with"
        )
    if (largest := max(batch_sizes)) > _LARGEST_BATCH:
        raise ValueError(f"batch_sizes has {largest}, and is of at most {_LARGEST_BATCH}: a comparison needs no more")


@torch.no_grad()
def readable(module: nn.Module, candidates: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The arguments that the model itself reads: some of other packages take no empty batch, or no small image."""
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
    """The arguments `example` with none of their rows, if the model itself reads them."""
    return readable(module, [tree_map(lambda tensor: tensor[:0], example)])


def write_checked(
    module: nn.Module,
    example: tuple[Any, ...],
    target: Path,
    spec: FileSpec,
    *,
    format: str,
    compare: Callable[[Callable[..., Any]], list[Comparison]],
    model: nn.Module,
    unit: str,
    tolerance: float,
    timed: tuple[Any, ...] | None,
    narrower: str = "",
) -> ExportReport:
    """Write `module` to `target`, after `compare` has found the file equal to the model.

    The file is traced with the arguments `example`; `compare` gets it as a function. `timed` are the arguments of one
    call that is timed, in the module and in the file; None leaves that out. Those of `spec.reads` without rows are run,
    too, in formats that take them. `model` and `unit` (what a batch holds) are named in messages, and so is `narrower`,
    a key with which the file would be easier to write. Raises ValueError if the format cannot represent the module, or
    the file differs too much, and OSError, which names `target`, if the system refuses to write, as on a full disk. An
    existing file of that name then remains as it is.
    """
    started = time.perf_counter()
    # Before a runtime is loaded: its idle threads slow down the rest of the process.
    model_ms = None if timed is None else latency_ms(module, *timed)
    file_ms = None
    # A folder, because a file may have another beside it, which it knows by its final name. It lies in what exists of
    # the path of the file, so that a failure leaves none of the folders that are still to be made.
    above = next(place for place in target.parents if place.exists())
    folder = above / f".partial.{os.getpid()}.{target.name}"
    partial = folder / target.name
    try:
        folder.mkdir()
        with quiet():
            nodes = FORMATS[format].write(module, example, partial, spec)
            call = FORMATS[format].open_file(partial)
            comparisons = compare(call)
            if getattr(FORMATS[format], "takes_no_rows", lambda: False)():
                _check_without_rows(call, module, spec)
            if timed is not None:
                file_ms = latency_ms(call, *timed)
        _check_comparisons(comparisons, unit, tolerance)
        beside = sorted(path for path in folder.iterdir() if path != partial)
        size = sum(path.stat().st_size for path in (partial, *beside))
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in (*beside, partial):
            os.replace(path, target.with_name(path.name))
    except Exception as error:
        if (refused := _refusal_in(error, folder, partial)) is not None:
            raise OSError(refused.errno, refused.strerror, str(target)) from error
        reason = textwrap.shorten(str(error) or type(error).__name__, 300)
        others = " or ".join([f"format={name}" for name in FORMATS if name != format])
        ways = f"{narrower}, or {others}" if narrower else others
        raise ValueError(
            f"format={format} could not take this {model_name(model)} and no file was written: {reason} "
            f"(another way: {ways})"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ExportReport(
        path=target,
        beside=[target.with_name(path.name) for path in beside],
        format=format,
        unit=unit,
        seconds=time.perf_counter() - started,
        size=size,
        nodes=nodes,
        comparisons=comparisons,
        metadata=spec.metadata,
        tolerance=tolerance,
        model_ms=model_ms,
        file_ms=file_ms,
    )


def _refusal_in(error: Exception, folder: Path, partial: Path) -> OSError | None:
    """The error of the system that made writing the files of a folder fail; None if `error` has another reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return error if Path(error.filename).is_relative_to(folder) else None
    return refusal_in(error, partial)


@torch.no_grad()
def _check_without_rows(call: Callable[..., Any], module: nn.Module, spec: FileSpec) -> None:
    """Raise RuntimeError unless the file gives the model's shapes for those arguments that have no rows."""
    for arguments in spec.reads:
        if len(tree_leaves(arguments)[0]):
            continue
        found, expected = ([tuple(each.shape) for each in tree_leaves(run(*arguments))] for run in (call, module))
        if found != expected:
            raise RuntimeError(f"for no rows the file gives {found}, the model {expected}")


def _check_comparisons(comparisons: Sequence[Comparison], unit: str, tolerance: float) -> None:
    for row in comparisons:
        if not row.passed:
            floor = f"three times the model's own rounding to float32, which is above tolerance={tolerance:g}"
            raise RuntimeError(
                f"for {unit}s {list(row.shape)} the file differs from the model by {row.difference:.1e}, "
                f"allowed are {row.limit:.1e} ({floor if row.is_floor else f'tolerance={tolerance:g}'})"
            )
