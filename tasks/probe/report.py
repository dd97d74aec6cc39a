"""What a run of a probe reports."""

from __future__ import annotations

from longseq.tasks.report import Report


class ProbeReport(Report):
    """Names the metrics of the closing table."""

    headline = ("accuracy", "sequence_accuracy", "loss")
