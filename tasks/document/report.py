"""What a run of a document classifier reports beside its metrics: the linear model, lengths, classes, and commands."""

from __future__ import annotations

from typing import Any

from longseq.tasks.document.info import DocumentInfo
from longseq.tasks.document.linear import LinearBaseline
from longseq.tasks.document.metrics import BINS, LENGTHS
from longseq.tasks.document.module import DocumentTask
from longseq.tasks.training.class_report import ClassReport

# The bins of lengths in words.
_LENGTHS = dict(
    zip(BINS, [*(f"up to {length:,} tokens" for length in LENGTHS), f"over {LENGTHS[-1]:,} tokens"], strict=True)
)


class DocumentReport(ClassReport):
    """Adds to the figures of each class the linear model's metrics, and the documents by length."""

    unit = "documents"
    headline = ("accuracy", "f1_macro", "average_precision", "calibration_error", "loss")

    def extras(self, module: DocumentTask, info: DocumentInfo, split: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if (baseline := _baseline(module)) is not None:
            found |= {f"{split}/linear_{name}": value for name, value in baseline.scores.items()}
        if module.documents_by_length is not None:
            found[f"{split}/documents_by_length"] = dict(module.documents_by_length)
        return found | super().extras(module, info, split)

    def counts(self, module: DocumentTask, info: DocumentInfo, split: str) -> dict[str, int]:
        found = module.documents_by_length or {}
        return {
            f"{split}/documents": sum(found.values()),
            **{f"{split}/documents_{name}": n for name, n in found.items()},
        }

    def rows(self, module: DocumentTask, info: DocumentInfo) -> list[tuple[str, str]]:
        measured, found = module.trainer.callback_metrics, module.documents_by_length or {}
        rows = [
            (f"accuracy {_LENGTHS[name]}", f"{float(measured[f'test/accuracy_{name}']):.4f} of {count:,} documents")
            for name, count in found.items()
        ]
        if (baseline := _baseline(module)) is not None:
            rows.append(("linear model", baseline.describe()))
        return rows + super().rows(module, info)

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq predict {checkpoint} input=FILE"]


def _baseline(module: DocumentTask) -> LinearBaseline | None:
    """The callback that has measured the linear model; None where the run has none or is of that model itself."""
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    found = next((callback for callback in callbacks if isinstance(callback, LinearBaseline)), None)
    return found if found is not None and found.documents else None
