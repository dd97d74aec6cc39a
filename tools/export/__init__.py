"""`longseq export`: a model as one ONNX, TorchScript or pt2 file that runs without longseq."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longseq.tasks.commands import Export
from longseq.tasks.training.configuration import read_command
from longseq.tools.export.document_classifier import export_document_classifier
from longseq.tools.export.formats import FORMATS, SUFFIXES, check_beside, kind_of, register_format
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

OPSET = 20  # where the command does not give it
# The formats that have no opset.
WITHOUT_OPSET = ("torchscript", "pt2")

# The tasks whose models can be exported: for each the function, and the keys that only its models have. These have the
# values of keys that are left out.
EXPORTS: Mapping[str, tuple[Callable[..., ExportReport], Mapping[str, Any]]] = {
    "image": (export_image_classifier, {"preprocess": False, "softmax": False, "dynamic_resolution": False}),
    "lm": (export_language_model, {"dynamic_length": False, "max_length": 2048}),
    "document": (export_document_classifier, {}),
}


def run(cfg: DictConfig) -> ExportReport:
    """Export the checkpoint of the configuration `export.yaml`, and print how the file compares with the model."""
    # Imported here, because an export from Python needs no training packages.
    from longseq.tasks import registry
    from longseq.tasks.training import checkpoint
    from longseq.tasks.training.files import check_file

    keys = read_command(Export, cfg)
    assert keys.checkpoint is not None
    format = keys.format or _format_of(keys.output)
    if keys.opset != OPSET and format in WITHOUT_OPSET:
        raise ValueError(f"opset={keys.opset} has no effect: it is of ONNX, and format={format} has none; leave it out")
    tasks = {name: base for base in EXPORTS for name in registry.like(base)}
    if keys.output is not None:  # before the model is read
        check_file(Path(keys.output), kind_of(format), reads=[keys.checkpoint])
    else:
        checkpoint.refuse_hub(keys.checkpoint)
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, any_resolution=keys.dynamic_resolution, tasks=tasks)
    model: Any = loaded.backbone
    export, defaults = EXPORTS[tasks[loaded.task_name]]
    _check_keys(keys, defaults, loaded.task_name)
    output = Path(keys.output or loaded.file.with_suffix(SUFFIXES.get(format, "")))
    if keys.output is None:
        check_file(output, kind_of(format))
    check_beside(model, output, format)
    options: dict[str, Any] = {
        "format": format,
        "data": loaded.data,
        "opset": keys.opset,
        "batch_sizes": keys.batch_sizes,
        "tolerance": keys.tolerance,
        "measure_latency": keys.latency,
        "extra_metadata": {
            "task": loaded.task_name,
            "checkpoint_sha256": checkpoint.sha256(loaded.file),
            "weights": loaded.weights,
            "epoch": loaded.epoch,
            "global_step": loaded.global_step,
        },
    }
    report = export(model, output, **{name: getattr(keys, name) for name in defaults}, **options)
    report.print()
    return report


def _check_keys(keys: Export, own: Mapping[str, Any], task: str) -> None:
    """Raise ValueError for a key that models of other tasks have."""
    others = {name: value for _, defaults in EXPORTS.values() for name, value in defaults.items() if name not in own}
    for name, default in others.items():
        if getattr(keys, name) != default:
            value = str(getattr(keys, name)).lower()
            raise ValueError(f"{name}={value} is not for models of task={task}: leave it out")


def _format_of(output: str | None) -> str:
    """The format of the output's ending; ONNX without an output. ValueError for another ending."""
    if output is None:
        return "onnx"
    suffix = Path(output).suffix
    format = next((name for name, own in SUFFIXES.items() if own == suffix), None)
    if format is None:
        endings = ", ".join(SUFFIXES.values())
        raise ValueError(f"output={output} tells no format: give a name that ends in one of {endings}, or format=NAME")
    return format
