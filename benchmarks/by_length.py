"""Draw the accuracy by the length of a review, imdb.png, from imdb.json.

python benchmarks/by_length.py

The row that was a language model first is left out: its lengths are in other tokens than those of the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from table import read

HERE = Path(__file__).parent
BINS = {"up_to_512": "up to 512", "up_to_1024": "up to 1024", "up_to_4096": "up to 4096", "longer": "longer, cut"}
MARKERS = "osD"  # a marker for each ten colours


def accuracies(row: Mapping[str, Mapping[str, float]]) -> list[float]:
    """The accuracy of each bin, a mean over seeds."""
    return [statistics.mean(row[name].values()) for name in BINS]


def draw() -> Figure:
    rows = [row for row in read("imdb")["rows"] if all(name in row for name in BINS)]
    rows.sort(key=lambda row: -statistics.mean(row["test/accuracy"].values()))
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(rows):
        linear = row["mixer"] == "linear"
        style = {"color": "black", "linestyle": "--"} if linear else {"color": f"C{number % 10}"}
        axes.plot(list(BINS.values()), accuracies(row), marker=MARKERS[number // 10], label=row["mixer"], **style)
    axes.set_xlabel("bytes of a review")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=9)
    return figure


if __name__ == "__main__":
    draw().savefig(HERE / "imdb.png", dpi=100)
