"""Save the results of `longseq compare` in this folder:

python benchmarks/comparison.py RESULTS.json NAME TITLE [NOTE ...]

Writes NAME.json. For a comparison with several columns, each row has a name and the value of each seed in each column,
and NAME.png is the plot. For a comparison with one column, rows also have sizes, seconds and speeds. RESULTS.json may
be several files of one commit, separated by commas: the columns of one table. A comparison that tried learning rates
(rates_at) adds its rows to NAME.json or replaces them there.

python benchmarks/comparison.py NAME

Draws NAME.png again from the rows of NAME.json, where these came from several commands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from keep import merge

from longseq.tasks import comparison

HERE = Path(__file__).parent


def row(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The cells of a row: the value of each seed at the best learning rate, and the mean seconds of its runs.

    The number of parameters is a cell where all runs of the row have as many.
    """
    entries = [entry for entry in results["summary"] if entry["name"] == name]
    cells: dict[str, Any] = {"mixer": name.replace("mixer.options.", "").replace("model.", "")}
    finished = [one for one in results["rows"] if one["name"] == name and "metrics" in one]
    for heading, setting, metric in comparison.columns(results):
        for entry in entries:
            if entry["setting"] == setting:
                rate = entry["learning_rate"]
                chosen = [one for one in finished if (one["setting"], one["learning_rate"]) == (setting, rate)]
                values = by_seed(chosen, metric, 4)
                cells[heading] = values or "diverged"
    if any(entry["learning_rate"] is not None for entry in entries):
        cells["learning_rates"] = ", ".join(f"{entry['learning_rate']:g}" for entry in entries)
    sizes = {one["metrics"].get("parameters") for one in finished}
    cells |= {"parameters": sizes.pop()} if len(sizes) == 1 else {}
    seconds = [one["metrics"]["seconds"] for one in finished]
    cells["seconds_a_run"] = round(sum(seconds) / len(seconds)) if seconds else None
    return cells | {"measured": results["measured"]}


def by_seed(rows: Sequence[Mapping[str, Any]], metric: str, digits: int | None = None) -> dict[str, Any]:
    found = {row["seed"]: round(row["metrics"][metric], digits) for row in rows if metric in row["metrics"]}
    return {str(seed): found[seed] for seed in sorted(found)}


def trained_row(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The cells of a row of a comparison with one column, at the best of its learning rates."""
    report, metric = results["report"], results["selected_by"]
    (entry,) = (entry for entry in results["summary"] if entry["name"] == name)
    finished = [one for one in results["rows"] if one["name"] == name and "metrics" in one]
    if not finished:
        return {"model": name, report.replace("/", "_"): "diverged", "measured": results["measured"]}
    tried: dict[float | None, list[Any]] = {}
    for one in finished:
        tried.setdefault(one["learning_rate"], []).append(one)
    finished = tried[entry["learning_rate"]]
    first = finished[0]["metrics"]
    cells = {
        "model": name,
        "parameters": first["parameters"],
        "epochs": first["epochs"],
        report.replace("/", "_"): by_seed(finished, report, 4),
        metric.replace("val/", "validation_"): by_seed(finished, metric, 4),
        "seconds": by_seed(finished, "seconds"),
    }
    if len(tried) > 1:
        means = {rate: fmean(one["metrics"][metric] for one in runs) for rate, runs in tried.items()}
        values = ", ".join(f"{rate:g} {value:.4f}" for rate, value in means.items())
        cells |= {"learning_rate": entry["learning_rate"], f"tried_{metric}": values}
    speeds = [key for key in first if key.endswith("_per_second")]
    cells |= {key: by_seed(finished, key) for key in speeds}
    return cells | {"runs_at_a_time": results["jobs"], "measured": finished[0].get("measured", results["measured"])}


def tuned_row(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The cells of a row whose learning rate was tried in shorter runs: these, the costs, and the curve of a seed."""
    metric, report = results["selected_by"], results["report"]
    tried = {f"{one['learning_rate']:g}": one.get("metrics", {}) for one in results["tries"] if one["name"] == name}
    (costs,) = (entry for entry in results["costs"] if entry["name"] == name)
    (entry,) = (entry for entry in results["summary"] if entry["name"] == name)
    finished = [one for one in results["rows"] if one["name"] == name and "metrics" in one]
    spans = finished[0]["metrics"].get("test/perplexity_by_position", ())
    by_position = [[span["from"], span["to"], round(span["perplexity"], 3)] for span in spans]
    return {
        "model": name.replace("mixer.options.", ""),
        "learning_rate": entry["learning_rate"],
        f"tried_{metric}": ", ".join(f"{rate} {found.get(metric, nan):.4f}" for rate, found in tried.items()),
        report.replace("/", "_"): by_seed(finished, report, 4),
        **{key: round(costs[key]) for key in comparison.COSTS if key in costs},
        **({"perplexity_by_position": by_position} if spans else {}),
        f"curve_{metric}": [[step, round(seconds, 1), round(value, 4)] for step, seconds, value in costs["curves"][0]],
        "runs_at_a_time": results["jobs"],
        "measured": results["measured"],
    }


def read(files: str) -> dict[str, Any]:
    """The results of one command, or of several as if they were one."""
    first, *others = (json.loads(Path(file).read_text(encoding="utf-8")) for file in files.split(","))
    for other in others:
        if other["measured"]["commit"] != first["measured"]["commit"]:
            sys.exit(f"{files} are of several commits: keep each as its own table")
        first["command"] += f"; {other['command']}"
        for key in ("rows", "summary", "training_seconds"):
            first[key] += other[key]
    return first


def results_of(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a file, which have the value of each seed in each column, as the results of one command.

    A column in which a row diverged has no value of it.
    """
    columns = [(row, heading) for row in kept["rows"] for heading in row if "=" in heading]
    columns = [(row, heading) for row, heading in columns if row[heading] != "diverged"]
    runs = [
        {
            "name": row["mixer"],
            "setting": dict([heading.split("=", 1)]),
            "seed": int(seed),
            "learning_rate": None,
            "status": "finished",
            "metrics": {kept["report"]: value},
        }
        for row, heading in columns
        for seed, value in row[heading].items()
    ]
    summary = comparison.summarize(runs, kept["report"], kept["report"])
    return {"rows": runs, "summary": summary, "report": kept["report"]}


def main() -> None:
    if len(sys.argv) == 2:
        name = sys.argv[1]
        comparison.plot(results_of(json.loads((HERE / f"{name}.json").read_text())), HERE / f"{name}.png")
        return
    source, name, title, *notes = sys.argv[1:]
    results = read(source)
    seeds = sorted({one["seed"] for one in results["rows"]})
    several = len(comparison.columns(results)) > 1
    names = dict.fromkeys(entry["name"] for entry in results["summary"])
    told = f" The plot: {name}.png." if several else ""
    kept = {
        "what": title,
        "command": results["command"],
        "kind": "accuracy",
        "report": results["report"],
        "rows": [(row if several else tuned_row if "tries" in results else trained_row)(results, one) for one in names],
        "notes": [
            f"{results['report']} of the checkpoint with the best {results['selected_by']}; seeds "
            f"{', '.join(map(str, seeds))}: mean ± standard deviation of several (the value of each). "
            f"{results['jobs']} runs at a time; {results['training_seconds']:.0f} s of training in all.{told}",
            *notes,
        ],
    }
    file = HERE / f"{name}.json"
    if "tries" in results and file.exists():
        kept = merge(json.loads(file.read_text()), kept, {})
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    if several:
        comparison.plot(results, HERE / f"{name}.png")


if __name__ == "__main__":
    main()
