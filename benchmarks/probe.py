"""Keep the results of `longseq probe` beside this page: python benchmarks/probe.py RESULTS.json NAME TITLE [NOTE ...]

Writes NAME.json, a row for each mixer with the value of each seed in each column, and NAME.png. RESULTS.json may be
several files of one commit, with commas between them: the columns of one table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longseq.tasks.probe import comparison

HERE = Path(__file__).parent


def row(results: Mapping[str, Any], mixer: str) -> dict[str, Any]:
    """The cells of a mixer: the value of each seed at the learning rate that won, and the mean seconds of its runs."""
    entries = [entry for entry in results["summary"] if entry["mixer"] == mixer]
    cells: dict[str, Any] = {"mixer": mixer.replace("mixer.options.", "").replace("model.", "")}
    finished = [one for one in results["rows"] if one["mixer"] == mixer and "metrics" in one]
    for heading, setting, metric in comparison.columns(results):
        for entry in entries:
            if entry["setting"] == setting:
                rate = entry["learning_rate"]
                chosen = [one for one in finished if (one["setting"], one["learning_rate"]) == (setting, rate)]
                values = {
                    str(one["seed"]): round(one["metrics"][metric], 4) for one in chosen if metric in one["metrics"]
                }
                cells[heading] = values or "diverged"
    if any(entry["learning_rate"] is not None for entry in entries):
        cells["learning_rates"] = ", ".join(f"{entry['learning_rate']:g}" for entry in entries)
    seconds = [one["metrics"]["seconds"] for one in finished]
    cells["seconds_a_run"] = round(sum(seconds) / len(seconds)) if seconds else None
    return cells | {"measured": results["measured"]}


def read(files: str) -> dict[str, Any]:
    """The results of one command, or of several as if they were one."""
    first, *others = (json.loads(Path(file).read_text()) for file in files.split(","))
    for other in others:
        if other["measured"]["commit"] != first["measured"]["commit"]:
            sys.exit(f"{files} are of several commits: keep each as its own table")
        first["command"] += f"; {other['command']}"
        for key in ("rows", "summary", "training_seconds"):
            first[key] += other[key]
    return first


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    source, name, title, *notes = sys.argv[1:]
    results = read(source)
    seeds = sorted({one["seed"] for one in results["rows"]})
    kept = {
        "what": title,
        "command": results["command"],
        "kind": "accuracy",
        "rows": [row(results, mixer) for mixer in dict.fromkeys(entry["mixer"] for entry in results["summary"])],
        "notes": [
            f"{results['report']} of the checkpoint with the best {results['selected_by']}; seeds "
            f"{', '.join(map(str, seeds))}: mean ± standard deviation of several (the value of each). "
            f"{results['jobs']} runs at a time; {results['training_seconds']:.0f} s of training in all. The plot: "
            f"{name}.png.",
            *notes,
        ],
    }
    (HERE / f"{name}.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    comparison.plot(results, HERE / f"{name}.png")


if __name__ == "__main__":
    main()
