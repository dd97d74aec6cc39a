"""Keep the results of `longseq probe` beside this page: python benchmarks/probe.py RESULTS.json NAME TITLE [NOTE ...]

Writes NAME.json, a row for each mixer with the mean over the seeds of each column, and NAME.png. RESULTS.json may be
several files, with commas between them: the columns of one table.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longseq.tasks.probe import comparison

HERE = Path(__file__).parent


def row(results: Mapping[str, Any], mixer: str) -> dict[str, Any]:
    """The cells of a mixer: means, of several seeds with the standard deviation, and its runs' mean seconds."""
    entries = [entry for entry in results["summary"] if entry["mixer"] == mixer]
    cells: dict[str, Any] = {"mixer": mixer.replace("mixer.options.", "").replace("model.", "")}
    for heading, setting, metric in comparison.columns(results):
        found = [entry for entry in entries if entry["setting"] == setting]
        if not found:
            continue
        value = found[0]["metrics"].get(metric)
        if value is None:
            cells[heading] = "diverged"
        elif value["std"] is None:
            cells[heading] = round(value["mean"], 3)
        else:
            cells[heading] = f"{value['mean']:.3f} ± {value['std']:.3f}"
    if any(entry["learning_rate"] is not None for entry in entries):
        cells["learning_rates"] = ", ".join(f"{entry['learning_rate']:g}" for entry in entries)
    finished = [one["metrics"]["seconds"] for one in results["rows"] if one["mixer"] == mixer and "metrics" in one]
    return cells | {"seconds_a_run": round(sum(finished) / len(finished)) if finished else None}


def read(files: str) -> dict[str, Any]:
    """The results of one command, or of several as if they were one."""
    first, *others = (json.loads(Path(file).read_text()) for file in files.split(","))
    for other in others:
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
        "date": datetime.date.today().isoformat(),
        "device": results["device"],
        "versions": results["versions"],
        "rows": [row(results, mixer) for mixer in dict.fromkeys(entry["mixer"] for entry in results["summary"])],
        "notes": [
            f"{results['report']} of the checkpoint with the best {results['selected_by']}; seeds "
            f"{', '.join(map(str, seeds))}, mean and standard deviation of several. {results['jobs']} runs "
            f"at a time; {results['training_seconds']:.0f} s of training in all. The plot: {name}.png.",
            *notes,
        ],
    }
    (HERE / f"{name}.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    comparison.plot(results, HERE / f"{name}.png")


if __name__ == "__main__":
    main()
