"""Export of image classifiers: one file with its preprocessing, compared with the model before it gets its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from longseq.timm_models import model_name, stated_data, takes_any_resolution
from longseq.tools.export import onnx_file
from longseq.tools.export.checked_file import (
    TRACED_BATCH,
    check_batch_sizes,
    float_copy,
    no_rows,
    readable,
    write_checked,
)
from longseq.tools.export.formats import find_target
from longseq.tools.export.metadata import classifier_metadata
from longseq.tools.export.parity import compare, expect, probe_images
from longseq.tools.export.report import ExportReport
from longseq.tools.export.spec import AXES, FileSpec

__all__ = ["ImageClassifierFile", "export_image_classifier"]


class ImageClassifierFile(nn.Module):
    """The function that an exported file computes: [uint8 pixels -> normalised] -> backbone -> [softmax].

    With `multi_label`, `softmax` gives each label its own probability, which is the sigmoid of its logit.
    With `image_size` it refuses other sizes; without this check, sizes with the same number of positions would pass.
    With `patch_size` it refuses images that are no whole number of patches, as the model does.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        image_size: tuple[int, int] | None,
        patch_size: tuple[int, int] | None = None,
        normalise: tuple[Sequence[float], Sequence[float]] | None,
        softmax: bool,
        multi_label: bool = False,
    ) -> None:
        super().__init__()
        self.multi_label = multi_label
        self.backbone = backbone
        self.image_size = image_size
        self.patch_size = patch_size
        self.softmax = softmax
        self.preprocess = normalise is not None
        mean, std = normalise or ((), ())
        self.register_buffer("mean", torch.tensor(list(mean)).reshape(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).reshape(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        if self.image_size is not None:
            images = _require_size(images, *self.image_size)
        if self.patch_size is not None:
            images = _require_whole_patches(images, *self.patch_size)
        if self.preprocess:
            images = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        logits = self.backbone(images)
        if not self.softmax:
            return logits
        return logits.sigmoid() if self.multi_label else logits.softmax(-1)


@torch.jit.script_if_tracing
def _require_size(images: Tensor, height: int, width: int) -> Tensor:
    if images.size(2) != height or images.size(3) != width:
        raise RuntimeError("this file takes one image size: see img_size in its metadata")
    return images


def _require_whole_patches(images: Tensor, height: int, width: int) -> Tensor:
    if not torch.compiler.is_exporting():
        return _raise_for_part_of_patch(images, height, width)
    # ONNX has no error to raise, but refuses an index that is not there.
    rest = torch.tensor(0) + images.shape[2] % height + images.shape[3] % width
    return images + images.new_zeros(1).index_select(0, rest.reshape(1))


@torch.jit.script_if_tracing
def _raise_for_part_of_patch(images: Tensor, height: int, width: int) -> Tensor:
    if images.size(2) % height != 0 or images.size(3) % width != 0:
        raise RuntimeError("this file takes whole patches: see patch_size in its metadata")
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
    interpolation, crop_pct, crop_mode, class_names; multi_label and thresholds of decisions); missing entries are those
    that the model states. With multi_label, the probabilities of a row are each label's own.

    `longseq.tools.export.parity.compare` defines how far the file may be from the model. Raises ValueError if the
    format cannot represent the model, or the file differs too much, and OSError if the system refuses to write
    it; an existing file of that name then remains as it is.
    """
    target = find_target(output, format)
    data = {**stated_data(model), **(data or {})}
    _check_request(model, data, format, preprocess, dynamic_resolution, opset, batch_sizes)
    height, width = _pair(data["img_size"])
    copied = float_copy(model)
    whole_patches = _whole_patches(copied, data["in_chans"], height, width) if dynamic_resolution else None
    module = ImageClassifierFile(
        copied,
        image_size=None if dynamic_resolution else (height, width),
        patch_size=whole_patches,
        normalise=(data["mean"], data["std"]) if preprocess else None,
        softmax=softmax,
        multi_label=bool(data.get("multi_label")),
    ).eval()

    sizes = _resolutions(model, height, width) if dynamic_resolution else [(height, width)]
    example = probe_images(TRACED_BATCH, data["in_chans"], *sizes[-1], pixels=preprocess)
    probes = [
        probe_images(batch, data["in_chans"], *size, pixels=preprocess)
        for size in sizes[:-1] or sizes
        for batch in batch_sizes
    ]
    if dynamic_resolution:
        smallest = [
            (probe_images(min(batch_sizes), data["in_chans"], *size, pixels=preprocess),)
            for size in _smallest(model, height, width)
        ]
        probes += [images for (images,) in readable(module, smallest)]
    expected = expect(module, probes)
    for batch in expected:
        _check_output(model, batch.output, data)
    extra = {**({} if whole_patches is None else {"patch_size": list(whole_patches)}), **extra_metadata}
    spec = FileSpec(
        inputs={"images": AXES if dynamic_resolution else {0: AXES[0]}},
        outputs=("probabilities" if softmax else "logits",),
        metadata=classifier_metadata(model, data, preprocess=preprocess, softmax=softmax, extra=extra),
        opset=opset,
        reads=[*((images,) for images in probes), *no_rows(module, (example,))],
    )
    return write_checked(
        module,
        (example,),
        target,
        spec,
        format=format,
        compare=lambda call: [compare(call, batch, tolerance) for batch in expected],
        model=model,
        unit="image",
        tolerance=tolerance,
        timed=(probes[0],) if measure_latency else None,
        narrower="dynamic_resolution=false" if dynamic_resolution else "",
    )


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
    check_batch_sizes(batch_sizes)
    if format == "onnx":
        onnx_file.check(model, opset)
    if dynamic_resolution and not takes_any_resolution(model):
        raise ValueError(
            f"dynamic_resolution=true: this {model_name(model)} takes {data['img_size']} px only; "
            "build it with dynamic_img_size=True, or export one file for each size"
        )


def _patch_size(model: nn.Module) -> tuple[int, int]:
    """The size of a patch; for a model without patches, that by which most of them reduce an image."""
    return _pair(getattr(getattr(model, "patch_embed", None), "patch_size", 32))


def _whole_patches(model: nn.Module, channels: int, height: int, width: int) -> tuple[int, int] | None:
    """The size of a patch, if the model reads whole patches only: neither leaves a rest out nor pads it."""
    rows, columns = _patch_size(model)
    part = probe_images(1, channels, height + rows // 2, width + columns // 2, pixels=False)
    return None if readable(model, [(part,)]) else (rows, columns)


def _smallest(model: nn.Module, height: int, width: int) -> list[tuple[int, int]]:
    """Images one patch high, one patch wide, and both."""
    rows, columns = _patch_size(model)
    return [(rows, width), (height, columns), (rows, columns)]


def _resolutions(model: nn.Module, height: int, width: int) -> list[tuple[int, int]]:
    """The sizes to compare at, and the size to trace with, which is not square.

    All are whole numbers of patches, but for one of a model that pads images.
    """
    rows, columns = _patch_size(model)
    pads = getattr(getattr(model, "patch_embed", None), "dynamic_img_pad", False)
    padded = [(height + 1, width + columns - 1)] if pads else []
    steps = ((0, 0), (1, 0), (4, 6), (0, 2))
    return padded + [(height + down * rows, width + across * columns) for down, across in steps]


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


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
