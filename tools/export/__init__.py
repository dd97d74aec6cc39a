"""`longseq export`: an image classifier as one ONNX, TorchScript or pt2 file that runs without longseq."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from omegaconf import DictConfig

from longseq.tasks.training.command import CHECKPOINT_NEEDED, CommandKeys, read_command
from longseq.tasks.training.options import Length, OneOf, Range
from longseq.tools.export.formats import FORMATS, SUFFIXES, register_format
from longseq.tools.export.image_classifier import export_image_classifier
from longseq.tools.export.report import ExportReport

__all__ = ["FORMATS", "ExportReport", "export_image_classifier", "register_format", "run"]


@dataclass(frozen=True, kw_only=True)
class ExportKeys(CommandKeys):
    """The keys of `longseq export`; conf/export.yaml documents them."""

    checkpoint: Annotated[str | None, CHECKPOINT_NEEDED]
    format: Annotated[str | None, OneOf(FORMATS)]
    output: str | None
    weights: Literal["auto", "ema", "model"]
    preprocess: bool
    softmax: bool
    dynamic_resolution: bool
    opset: Annotated[int, Range(18, 26)]
    batch_sizes: Annotated[list[int], Range(1), Length(1)]
    tolerance: Annotated[float, Range(above=0)]
    latency: bool


def run(cfg: DictConfig) -> ExportReport:
    """Export the checkpoint of the configuration `export.yaml`, and print how the file compares with the model."""
    # Imported here, because an export from Python needs no training packages.
    from longseq.tasks import registry
    from longseq.tasks.training import checkpoint
    from longseq.tasks.training.files import prepare_file

    keys = read_command(ExportKeys, cfg)
    assert keys.checkpoint is not None
    format = keys.format or _format_of(keys.output)
    loaded = checkpoint.load(
        keys.checkpoint,
        weights=keys.weights,
        any_resolution=keys.dynamic_resolution,
        tasks=registry.like("image"),
    )
    output = Path(keys.output or loaded.file.with_suffix(SUFFIXES.get(format, "")))
    prepare_file(output)
    report = export_image_classifier(
        loaded.backbone,
        output,
        format=format,
        data=loaded.data,
        preprocess=keys.preprocess,
        softmax=keys.softmax,
        dynamic_resolution=keys.dynamic_resolution,
        opset=keys.opset,
        batch_sizes=keys.batch_sizes,
        tolerance=keys.tolerance,
        measure_latency=keys.latency,
        extra_metadata={
            "checkpoint_sha256": checkpoint.sha256(loaded.file),
            "weights": loaded.weights,
            "epoch": loaded.epoch,
            "global_step": loaded.global_step,
        },
    )
    report.print()
    return report


def _format_of(output: str | None) -> str:
    """The format of the output's ending; ONNX without a known one."""
    suffix = Path(output or "").suffix
    return next((name for name, own in SUFFIXES.items() if own == suffix), "onnx")
