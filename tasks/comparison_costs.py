"""What the rows of a comparison cost, and their validation curves over updates and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

Row = Mapping[str, Any]
# Metrics of a run that are costs, with their headings.
COSTS = {
    "parameters": "parameters",
    "parameters_without_embedding": "without embeddings",
    "state": "state",
    "flops_per_token": "FLOPs a token",
    "tokens_per_second": "tokens/s",
    "images_per_second": "images/s",
    "seconds": "seconds",
}


def read_curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    """The validations of a run: updates and values of a metric, from the files of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):  # a resumed run has several
        board = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        if metric in board.Tags()["scalars"]:
            found |= {event.step + 1: event.value for event in board.Scalars(metric)}
    return sorted(found.items())


def find_costs(results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """For each row and setting at its learning rate: the means of its costs over the seeds, and its curves.

    `equal_time` is the validation metric at the time that the fastest row takes in all: a run has trained in
    proportion to its updates, and the schedule of a slower one has not ended there. A row without a validation up to
    then has none.
    """
    entries = []
    for entry in results["summary"]:
        chosen = [row for row in results["rows"] if "metrics" in row and _is_of(row, entry)]
        if not chosen:
            continue
        metrics = [row["metrics"] for row in chosen]
        means = {key: fmean(one[key] for one in metrics) for key in COSTS if all(key in one for one in metrics)}
        curves = [
            [(step, step / row["metrics"]["updates"] * row["metrics"]["seconds"], value) for step, value in points]
            for row in chosen
            if "updates" in row["metrics"] and (points := read_curve(folder / row["folder"], results["selected_by"]))
        ]
        entries.append({"name": entry["name"], "setting": entry["setting"], **means, "curves": curves})
    shortest = min((entry["seconds"] for entry in entries if entry.get("seconds")), default=None)
    for entry in entries:
        series = [zip(*curve, strict=True) for curve in entry["curves"]]
        at = [np.interp(shortest, times, values, left=nan) for _, times, values in series if shortest is not None]
        if at and not np.isnan(at).any():
            entry["equal_time"] = fmean(at)
    return entries


def _is_of(row: Row, entry: Row) -> bool:
    return all(row[key] == entry[key] for key in ("name", "setting", "learning_rate"))


def cost_table(results: Mapping[str, Any]) -> list[list[str]]:
    """The heading and rows of the table of costs."""
    entries: Sequence[Row] = results["costs"]
    keys = [key for key in COSTS if any(key in entry for entry in entries)]
    timed = any("equal_time" in entry for entry in entries)
    last = [f"{results['selected_by']} at equal time"] if timed else []
    rows = [["model", *(COSTS[key] for key in keys), *last]]
    for entry in entries:
        name = " ".join([entry["name"], *(f"{key.rsplit('.', 1)[-1]}={x}" for key, x in entry["setting"].items())])
        cells = [f"{entry[key]:,.0f}" if key in entry else "" for key in keys]
        ending = [f"{entry['equal_time']:.3f}" if "equal_time" in entry else ""] if timed else []
        rows.append([name, *cells, *ending])
    return rows


def plot_curves(results: Mapping[str, Any], path: Path) -> None:
    """Draw the validation metric of each seed over updates and over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    for axes, place, label in zip(figure.subplots(1, 2, sharey=True), (0, 1), ("updates", "seconds"), strict=True):
        for number, entry in enumerate(results["costs"]):
            for seed, curve in enumerate(entry["curves"]):
                name = entry["name"] if seed == 0 else None
                axes.plot([point[place] for point in curve], [point[2] for point in curve], color=f"C{number % 10}",
                          linestyle=("-", "--", ":")[number // 10 % 3], linewidth=1, label=name)  # fmt: skip
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.axes[0].set_ylabel(results["selected_by"])
    figure.savefig(path)
