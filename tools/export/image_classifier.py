"""Export of image classifiers: one file with its preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from longseq.timm_models import stated_data, takes_any_resolution
from longseq.tools.export.checked_file import (
    TRACED_BATCH,
    float_copy,
    no_rows,
    probabilities,
    readable,
    write_checked,
)
from longseq.tools.export.metadata import check_class_names, classifier_metadata
from longseq.tools.export.parity import compare, expect, probe_images
from longseq.tools.export.report import ExportReport
from longseq.tools.export.spec import FileSpec

# The axes of images that a file may leave open.
AXES = {0: "batch", 2: "height", 3: "width"}


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
            images = _check_traced(images, *self.image_size, False)
        if self.patch_size is not None:
            images = _check_patches(images, *self.patch_size)
        if self.preprocess:
            images = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        logits = self.backbone(images)
        return probabilities(logits, multi_label=self.multi_label) if self.softmax else logits


@torch.jit.script_if_tracing
def _check_traced(images: Tensor, height: int, width: int, multiples: bool) -> Tensor:
    rows, columns = images.size(2), images.size(3)
    if multiples:
        rows, columns = height + rows % height, width + columns % width
    if rows != height or columns != width:
        raise RuntimeError("the file does not take images of this size: see img_size or patch_size in its metadata")
    return images


def _check_patches(images: Tensor, height: int, width: int) -> Tensor:
    if not torch.compiler.is_exporting():
        return _check_traced(images, height, width, True)
    # ONNX has no error to raise, but refuses an index that is not there.
    rest = torch.tensor(0) + images.shape[2] % height + images.shape[3] % width
    return images + images.new_zeros(1).index_select(0, rest.reshape(1))


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
    operators: str = "standard",
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

    `operators` of ONNX is standard, onnxruntime or opset27 (see `longseq.tools.export.operators`).
    `longseq.tools.export.parity.compare` defines how far the file may be from the model.

    Raises:
        ValueError: the file differs from the model; an existing file of that name then remains as it is.
    """
    data = {**stated_data(model), **(data or {})}
    if dynamic_resolution and not takes_any_resolution(model):
        raise ValueError("dynamic_resolution=true needs a model with dynamic_img_size=True")
    channels = data["in_chans"]
    height, width = _pair(data["img_size"])
    copied = float_copy(model)
    patch = _pair(getattr(getattr(model, "patch_embed", None), "patch_size", 32))  # most others reduce images by 32
    part = probe_images(1, channels, height + patch[0] // 2, width + patch[1] // 2, pixels=False)
    reads_parts = not dynamic_resolution or bool(readable(copied, [(part,)]))  # leaves a rest out, or pads it
    module = ImageClassifierFile(
        copied,
        image_size=None if dynamic_resolution else (height, width),
        patch_size=None if reads_parts else patch,
        normalise=(data["mean"], data["std"]) if preprocess else None,
        softmax=softmax,
        multi_label=bool(data.get("multi_label")),
    ).eval()

    sizes = _resolutions(model, height, width, patch) if dynamic_resolution else [(height, width)]
    example = (probe_images(TRACED_BATCH, channels, *sizes[-1], pixels=preprocess),)
    probes = [
        (probe_images(batch, channels, *size, pixels=preprocess),)
        for size in sizes[:-1] or sizes
        for batch in batch_sizes
    ]
    if dynamic_resolution:
        smallest = [(patch[0], width), (height, patch[1]), patch]
        images = [(probe_images(min(batch_sizes), channels, *size, pixels=preprocess),) for size in smallest]
        probes += readable(module, images)
    expected = expect(module, [images for (images,) in probes])
    check_class_names(data, expected[0].output.shape[-1])
    extra = {**({} if reads_parts else {"patch_size": list(patch)}), **extra_metadata}
    spec = FileSpec(
        inputs={"images": AXES if dynamic_resolution else {0: AXES[0]}},
        outputs=("probabilities" if softmax else "logits",),
        metadata=classifier_metadata(model, data, preprocess=preprocess, softmax=softmax, extra=extra),
        opset=opset,
        operators=operators,
        reads=[*probes, *no_rows(module, example)],
    )
    return write_checked(
        module,
        example,
        Path(output),
        spec,
        format=format,
        compare=lambda call: [compare(call, batch, tolerance) for batch in expected],
        unit="image",
        timed=probes[0] if measure_latency else None,
    )


def _resolutions(model: nn.Module, height: int, width: int, patch: tuple[int, int]) -> list[tuple[int, int]]:
    """The sizes to compare at, and the size to trace with, which is not square.

    All are whole numbers of patches, but for one of a model that pads images.
    """
    rows, columns = patch
    pads = getattr(getattr(model, "patch_embed", None), "dynamic_img_pad", False)
    padded = [(height + 1, width + columns - 1)] if pads else []
    steps = ((0, 0), (1, 0), (4, 6), (0, 2))
    return padded + [(height + down * rows, width + across * columns) for down, across in steps]


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
