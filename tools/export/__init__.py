"""`longseq export`: a model as a file of ONNX, TorchScript, pt2, ExecuTorch or OpenVINO, without longseq."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longseq.files import sha256
from longseq.tasks.commands import Export
from longseq.tasks.training.configuration import read_command
from longseq.tools.export.document_classifier import export_document_classifier
from longseq.tools.export.formats import FORMATS, SUFFIXES, register_format
from longseq.tools.export.image_classifier import export_image_classifier
from longseq.tools.export.language_model import export_language_model
from longseq.tools.export.report import ExportReport
from longseq.tools.export.states import StateSpec, state_spec

__all__ = [
    "FORMATS",
    "ExportReport",
    "StateSpec",
    "export_document_classifier",
    "export_image_classifier",
    "export_language_model",
    "register_format",
    "run",
    "state_spec",
]

# For each kind of task: the export of its models, and the keys that only this export reads.
EXPORTS: Mapping[str, tuple[Callable[..., ExportReport], Sequence[str]]] = {
    "image": (export_image_classifier, ("preprocess", "softmax", "dynamic_resolution")),
    "lm": (export_language_model, ("dynamic_length", "max_length")),
    "document": (export_document_classifier, ()),
}


def run(cfg: DictConfig) -> ExportReport:
    """Export the checkpoint of the configuration `export.yaml`, and print how the file compares with the model."""
    # Imported here, because an export from Python needs no training packages.
    from longseq.tasks import registry
    from longseq.tasks.training import checkpoint
    from longseq.tools.export.file_model import record_run

    keys = read_command(Export, cfg)
    format = keys.format or _format_of(keys.output)
    if keys.precision != "float32" and format != "onnx":
        raise ValueError(f"precision={keys.precision} is for ONNX files, not format={format}")
    if keys.calibrate is not None and keys.precision != "int8":
        raise ValueError("calibrate is for precision=int8")
    tasks = {name: base for base in EXPORTS for name in registry.like(base)}
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, any_resolution=keys.dynamic_resolution, tasks=tasks)
    model: Any = loaded.backbone
    kind = tasks[loaded.task_name]
    export, own = EXPORTS[kind]
    options = {name: getattr(keys, name) for name in own}
    output = Path(keys.output or loaded.file.with_suffix(SUFFIXES[format]))
    print(f"writing {output.name} and comparing it with the model, some seconds for each block", flush=True)
    report = export(
        model,
        output,
        format=format,
        data=loaded.data,
        opset=keys.opset,
        operators=keys.operators,
        batch_sizes=keys.batch_sizes,
        tolerance=keys.tolerance,
        measure_latency=keys.latency,
        extra_metadata={
            "task": loaded.task_name,
            "checkpoint_sha256": sha256(loaded.file),
            "weights": loaded.weights,
            "epoch": loaded.epoch,
            "global_step": loaded.global_step,
        },
        **options,
    )
    record_run(report, loaded, kind, options)
    if keys.precision != "float32":
        from longseq.tools.export.precision import shrink

        report = shrink(report, loaded, keys.precision, keys.allowed_drop, keys.calibrate)
    report.print()
    return report


def _format_of(output: str | None) -> str:
    """The format with the suffix of `output`; ONNX without an output."""
    if output is None:
        return "onnx"
    for name, suffix in SUFFIXES.items():
        if Path(output).suffix == suffix:
            return name
    raise ValueError(f"output={output} must end in {', '.join(SUFFIXES.values())}, or give format=NAME")
