"""Export of image classifiers: one file with its preprocessing, compared with the model before it gets its name."""

from __future__ import annotations

import copy
import os
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longseq.blocks.convolution import ShortConvolution
from longseq.mixers import Mixer
from longseq.timm_models import model_name, stated_data, takes_any_resolution
from longseq.tools.export import onnx_file, pt2_file, torchscript_file
from longseq.tools.export.metadata import classifier_metadata
from longseq.tools.export.parity import Comparison, compare, expect, latency_ms, probe_images
from longseq.tools.export.quiet import quiet
from longseq.tools.export.report import ExportReport
from longseq.tools.export.spec import AXES, FileSpec

__all__ = ["FORMATS", "SUFFIXES", "FileFormat", "ImageClassifierFile", "export_image_classifier", "register_format"]


class FileFormat(Protocol):
    """A file format: a module, or any object, with these two functions."""

    def write(self, module: nn.Module, example: Tensor, path: Path, spec: FileSpec) -> Counter[str]:
        """Write a module that maps images `[B, C, H, W]` to logits; return how often the file uses each operator."""

    def open_file(self, path: Path) -> Callable[[Tensor], Tensor]:
        """The file as a function of images, on the CPU; the export compares it with the module."""


_FORMATS: dict[str, Any] = {"onnx": onnx_file, "torchscript": torchscript_file, "pt2": pt2_file}
FORMATS: Mapping[str, FileFormat] = MappingProxyType(_FORMATS)

_SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "pt2": ".pt2"}
SUFFIXES: Mapping[str, str] = MappingProxyType(_SUFFIXES)


def register_format(name: str, suffix: str, file_format: FileFormat) -> None:
    """Register a file format, which `longseq export format=NAME` and names that end in `suffix` then choose."""
    if name in _FORMATS or suffix in _SUFFIXES.values() or not suffix.startswith("."):
        raise ValueError(f"the format {name!r} with the suffix {suffix!r} is there already, or its suffix has no dot")
    _FORMATS[name], _SUFFIXES[name] = file_format, suffix


# An axis of size 1 would be traced as a constant.
TRACED_BATCH = 2


class ImageClassifierFile(nn.Module):
    """The function that an exported file computes: [uint8 pixels -> normalised] -> backbone -> [softmax].

    With `image_size` it refuses other sizes; without this check, sizes with the same number of positions would pass.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        image_size: tuple[int, int] | None,
        normalise: tuple[Sequence[float], Sequence[float]] | None,
        softmax: bool,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.image_size = image_size
        self.softmax = softmax
        self.preprocess = normalise is not None
        mean, std = normalise or ((), ())
        self.register_buffer("mean", torch.tensor(list(mean)).reshape(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).reshape(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        if self.image_size is not None:
            images = _require_size(images, *self.image_size)
        if self.preprocess:
            images = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        logits = self.backbone(images)
        return logits.softmax(-1) if self.softmax else logits


@torch.jit.script_if_tracing
def _require_size(images: Tensor, height: int, width: int) -> Tensor:
    if images.size(2) != height or images.size(3) != width:
        raise RuntimeError("this file takes one image size: see img_size in its metadata")
    return images


def export_image_classifier(
    model: nn.Module,
    output: str | Path,
    *,
    format: str = "onnx",
    data: Mapping[str, Any] | None = None,
    preprocess: bool = False,
    softmax: bool = False,
    dynamic_resolution: bool = False,
    opset: int = 20,
    batch_sizes: Sequence[int] = (1, 3, 8),
    tolerance: float = 1e-4,
    measure_latency: bool = False,
    extra_metadata: Mapping[str, Any] = MappingProxyType({}),
) -> ExportReport:
    """Write `model` as one file, and compare the file with it, also on batch sizes other than the traced one.

    The file takes images [batch, channels, height, width] with any batch size: normalised float32, or uint8 pixels with
    `preprocess`. It gives logits [batch, classes], or probabilities with `softmax`. It is written in float32 from a
    copy on the CPU; the model does not change. `data` is what a checkpoint knows (img_size, in_chans, mean, std,
    interpolation, crop_pct, class_names); missing entries are those of the model's `pretrained_cfg`.

    `longseq.tools.export.parity.compare` defines how far the file may be from the model. Raises ValueError if the
    format cannot represent the model, or the file differs too much; an existing file of that name then remains as it
    is.
    """
    started = time.perf_counter()
    target = _target(output, format)
    data = {**stated_data(model), **(data or {})}
    _check_request(model, data, format, preprocess, dynamic_resolution, opset, batch_sizes)
    height, width = _pair(data["img_size"])
    module = ImageClassifierFile(
        _float_copy(model),
        image_size=None if dynamic_resolution else (height, width),
        normalise=(data["mean"], data["std"]) if preprocess else None,
        softmax=softmax,
    ).eval()

    sizes = _resolutions(model, height, width) if dynamic_resolution else [(height, width)]
    example = probe_images(TRACED_BATCH, data["in_chans"], *sizes[-1], pixels=preprocess)
    probes = [
        probe_images(batch, data["in_chans"], *size, pixels=preprocess)
        for size in sizes[:-1] or sizes
        for batch in batch_sizes
    ]
    expected = expect(module, probes)
    for batch in expected:
        _check_output(model, batch.output, data)
    # Before a runtime is loaded: its idle threads slow down the rest of the process.
    model_ms = latency_ms(module, probes[0]) if measure_latency else None
    spec = FileSpec(
        axes=AXES if dynamic_resolution else {0: AXES[0]},
        output_name="probabilities" if softmax else "logits",
        metadata=classifier_metadata(model, data, preprocess=preprocess, softmax=softmax, extra=extra_metadata),
        opset=opset,
    )

    partial = target.with_name(f".partial.{os.getpid()}.{target.name}")
    try:
        with quiet():
            nodes = FORMATS[format].write(module, example, partial, spec)
            call = FORMATS[format].open_file(partial)
            comparisons = [compare(call, batch, tolerance) for batch in expected]
            file_ms = latency_ms(call, probes[0]) if measure_latency else None
        _check_comparisons(comparisons, tolerance)
        size = partial.stat().st_size
        os.replace(partial, target)
    except Exception as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 300)
        others = " or ".join(name for name in FORMATS if name != format)
        raise ValueError(
            f"format={format} could not take this {model_name(model)} and no file was written: {reason} "
            f"(another way: format={others})"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return ExportReport(
        path=target,
        format=format,
        seconds=time.perf_counter() - started,
        size=size,
        nodes=nodes,
        comparisons=comparisons,
        metadata=spec.metadata,
        model_ms=model_ms,
        file_ms=file_ms,
    )


def _target(output: str | Path, format: str) -> Path:
    """The file to write, with its folder created; ValueError if its name has the ending of another format."""
    if format not in FORMATS:
        raise ValueError(f"format={format} is unknown: take one of {', '.join(FORMATS)}")
    target = Path(output)
    if target.is_dir():
        raise ValueError(
            f"output={output} is a folder: name a file in it, such as {target / ('model' + SUFFIXES[format])}"
        )
    for other, suffix in SUFFIXES.items():
        if other != format and target.suffix == suffix:
            raise ValueError(
                f"output={output} ends like a {other} file: take format={other} or a name in {SUFFIXES[format]}"
            )
    if target.suffix == ".ckpt":
        raise ValueError(f"output={output} ends like a checkpoint: take a name in {SUFFIXES[format]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _check_request(
    model: nn.Module,
    data: Mapping[str, Any],
    format: str,
    preprocess: bool,
    dynamic_resolution: bool,
    opset: int,
    batch_sizes: Sequence[int],
) -> None:
    needed = ("img_size", "in_chans", "mean", "std") if preprocess else ("img_size", "in_chans")
    missing = [key for key in needed if data.get(key) is None]
    if missing:
        raise ValueError(f"neither data nor the model's pretrained_cfg tells {', '.join(missing)}: pass data={{...}}")
    if not batch_sizes or TRACED_BATCH in batch_sizes:
        raise ValueError(
            f"batch_sizes={list(batch_sizes)}: name one or more, without {TRACED_BATCH}, which the file is traced with"
        )
    if format == "onnx":
        onnx_file.check(model, opset)
    if dynamic_resolution and not takes_any_resolution(model):
        raise ValueError(
            f"dynamic_resolution=true: this {model_name(model)} takes {data['img_size']} px only; "
            "build it with dynamic_img_size=True, or export one file for each size"
        )


def _resolutions(model: nn.Module, height: int, width: int) -> list[tuple[int, int]]:
    """The sizes to compare at, and the size to trace with; all are whole numbers of patches, the traced one is not
    square.
    """
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", 32)
    rows, columns = _pair(patch)
    steps = ((0, 0), (1, 0), (4, 6), (0, 2))
    return [(height + down * rows, width + across * columns) for down, across in steps]


def _float_copy(model: nn.Module) -> nn.Module:
    """A float32 copy on the CPU with the operations' exportable backend and without gradient checkpointing."""
    duplicate = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    disable_checkpointing = getattr(duplicate, "set_grad_checkpointing", None)
    if callable(disable_checkpointing):
        disable_checkpointing(False)
    for module in duplicate.modules():
        if isinstance(module, (Mixer, ShortConvolution)):
            module.backend = "torch"
    return duplicate


def _check_output(model: nn.Module, output: Tensor, data: Mapping[str, Any]) -> None:
    if output.ndim != 2:
        raise ValueError(
            f"{model_name(model)} gives {list(output.shape)} for one batch, not [batch, classes]: not a classifier"
        )
    if not output.isfinite().all():
        raise ValueError(f"{model_name(model)} gives values that are not finite: its weights are not worth exporting")
    names = data.get("class_names")
    if names and len(names) != output.shape[1]:
        raise ValueError(
            f"the model has {output.shape[1]} classes and class_names {len(names)}: pass the names of this model"
        )


def _check_comparisons(comparisons: Sequence[Comparison], tolerance: float) -> None:
    for row in comparisons:
        if not row.passed:
            raise RuntimeError(
                f"for images {list(row.shape)} the file differs from the model by {row.difference:.1e}, "
                f"allowed are {row.limit:.1e} (tolerance={tolerance:g})"
            )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
