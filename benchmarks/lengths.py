"""Draw the accuracy of document classifiers by the length of a document: python benchmarks/lengths.py NAME

Reads NAME.json and writes NAME.png. Rows that were not part of the comparison count their length in other tokens, and
are left out: they have a command of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from command import read_json, run_script

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from table import mean_of

HERE = Path(__file__).parent
LONGER = "longer"


def draw(name: str) -> None:
    file = HERE / f"{name}.json"
    rows = [row for row in read_json(file)["rows"] if "command" not in row]
    first = rows[0] if rows else {}
    bins = [key for key in first if key.startswith("up_to_")] + [LONGER] * (LONGER in first)
    if not bins or not all(isinstance(row.get(key), dict) for row in rows for key in bins):
        raise ValueError(f"{file}: its rows have no values of each seed by length (up_to_N, {LONGER})")
    figure, axes = plt.subplots(figsize=(7.5, 3.8), dpi=120)
    for row in sorted(rows, key=lambda row: -mean_of(row[bins[-1]])):
        style = {"color": "#111827", "linestyle": "--"} if row["mixer"] == "linear" else {}
        axes.plot([mean_of(row[key]) for key in bins], marker="o", label=row["mixer"], **style)
    axes.set_xticks(range(len(bins)), [key.replace("up_to_", "up to ").replace(LONGER, "longer, cut") for key in bins])
    axes.set_xlabel("bytes of a review")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.savefig(HERE / f"{name}.png", bbox_inches="tight")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(sys.argv[1])


if __name__ == "__main__":
    run_script(main, __doc__)
