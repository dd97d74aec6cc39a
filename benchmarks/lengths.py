"""Draw the accuracy of document classifiers by the length of a document: python benchmarks/lengths.py NAME

Reads NAME.json and writes NAME.png. Rows that were not part of the comparison count their length in other tokens, and
are left out: they have a command of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from table import mean_of

HERE = Path(__file__).parent
LONGER = "longer"


def draw(name: str) -> None:
    file = HERE / f"{name}.json"
    rows = [row for row in json.loads(file.read_text())["rows"] if "command" not in row]
    bins = [key for key in rows[0] if key.startswith("up_to_")] + [LONGER] * (LONGER in rows[0])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    options = parser.parse_args()
    draw(options.name)


if __name__ == "__main__":
    main()
