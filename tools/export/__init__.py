"""`longseq export`: an image classifier as one ONNX, TorchScript or pt2 file that runs without longseq."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from longseq.tools.export.image_classifier import FORMATS, SUFFIXES, export_image_classifier, register_format
from longseq.tools.export.report import ExportReport

__all__ = ["FORMATS", "ExportReport", "export_image_classifier", "register_format", "run"]


def run(cfg: DictConfig) -> ExportReport:
    """Export the checkpoint that the configuration `export.yaml` names, and print how the file compares with it."""
    # Here, because an export from Python needs no training packages.
    from longseq.tasks import registry
    from longseq.tasks.training import checkpoint

    if cfg.checkpoint is None:
        raise ValueError("give checkpoint=FILE, such as outputs/image/RUN/checkpoints/best.ckpt")
    if not isinstance(cfg.batch_sizes, ListConfig):
        raise ValueError(f"batch_sizes={cfg.batch_sizes} is no list: give one, such as batch_sizes=[1,3]")
    format = cfg.format or _format_of(cfg.output)
    loaded = checkpoint.load(
        cfg.checkpoint,
        weights=cfg.weights,
        any_resolution=cfg.dynamic_resolution,
        tasks=registry.like("image"),
    )
    report = export_image_classifier(
        loaded.backbone,
        cfg.output or loaded.file.with_suffix(SUFFIXES.get(format, "")),
        format=format,
        data=loaded.data,
        preprocess=cfg.preprocess,
        softmax=cfg.softmax,
        dynamic_resolution=cfg.dynamic_resolution,
        opset=cfg.opset,
        batch_sizes=list(cfg.batch_sizes),
        tolerance=cfg.tolerance,
        measure_latency=cfg.latency,
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
    """The format that the output's name asks for; ONNX where it asks for none."""
    suffix = Path(output or "").suffix
    return next((name for name, own in SUFFIXES.items() if own == suffix), "onnx")
