"""The results of a comparison: the best learning rate of each row and setting, its costs, tables and plots."""

from collections.abc import Collection, Mapping, Sequence
from math import inf, isfinite, isnan, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from longseq.tasks.circumstances import describe

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


def summarize(rows: Sequence[Row], report: str, selected_by: str, others: Collection[str] = ()) -> list[dict[str, Any]]:
    """For each row and setting, the learning rate with the best mean of `selected_by`, and its metrics over the seeds.

    A rate at which a run failed loses to one at which more runs finished. `metrics` holds mean, standard deviation
    (None for one seed) and number of runs for `report` and its slices, which are the metrics REPORT_* except `others`.
    ValueError for several rates whose metrics do not state which values of `selected_by` are better.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['name']} {row['setting']}", []).append(row)
    return [_best(group, report, selected_by, others) for group in groups.values()]


def _best(group: Sequence[Row], report: str, selected_by: str, others: Collection[str]) -> dict[str, Any]:
    finished: dict[Any, list[Row]] = {row["learning_rate"]: [] for row in group}
    for row in group:
        if "metrics" in row:
            finished[row["learning_rate"]].append(row["metrics"])
    every = [metrics for listed in finished.values() for metrics in listed]
    stated = {metrics.get("higher_is_better", {}).get(selected_by) for metrics in every} - {None}
    if len(stated) != 1 and sum(map(bool, finished.values())) > 1:
        raise ValueError(f"{selected_by} does not say which values are better: give one learning rate")
    sign = -1 if stated == {False} else 1

    def merit(rate: Any) -> tuple[int, float]:
        values = [sign * metrics.get(selected_by, nan) for metrics in finished[rate]]
        # `max` would keep a first rate of NaN.
        return len(values), -inf if not values or any(map(isnan, values)) else fmean(values)

    rate = max(finished, key=merit)
    values: dict[str, list[float]] = {}
    for metrics in finished[rate]:
        for key, value in metrics.items():
            is_slice = key.startswith(f"{report}_") and key not in others
            if isinstance(value, int | float) and (key == report or is_slice):
                values.setdefault(key, []).append(value)
    return {
        "name": group[0]["name"],
        "setting": group[0]["setting"],
        "learning_rate": rate,
        "finished": len(finished[rate]),  # at this rate
        "failed": sum("metrics" not in row for row in group),
        "metrics": {key: _spread(listed) for key, listed in values.items()},
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    # stdev fails for infinity, such as an overflowing perplexity
    deviation = (round(stdev(values), 6) if all(map(isfinite, values)) else nan) if len(values) > 1 else None
    return {"mean": round(fmean(values), 6), "std": deviation, "runs": len(values)}


def columns(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Heading, setting and metric of each column: the whole test, then each of several slices."""
    found: list[tuple[str, dict[str, Any], str]] = []
    report = results["report"]
    measured = [entry["setting"] for entry in results["summary"] if entry["metrics"]]
    for entry in results["summary"]:
        if not entry["metrics"] and entry["setting"] in measured:
            continue  # the slices are named by finished rows
        slices = [key for key in entry["metrics"] if key != report]
        whole = [report] if report in entry["metrics"] or not slices else []
        if whole and len(slices) == 1:
            slices = []  # the only slice is the whole test
        for metric in [*whole, *slices]:
            parts = [f"{key.rsplit('.', 1)[-1]}={value}" for key, value in entry["setting"].items()]
            parts += [metric.removeprefix(f"{report}_")] if metric != report or not parts else []
            column = (", ".join(parts), entry["setting"], metric)
            if column not in found:
                found.append(column)
    return found


def table(results: Mapping[str, Any]) -> list[list[str]]:
    """The heading and rows of the table: means over the seeds, with the standard deviation of several."""
    shown = columns(results)
    rows = [["model", *(heading for heading, _, _ in shown)]]
    for name in _names(results):
        rows.append([name, *(_cell(_entry(results, name, setting), metric) for _, setting, metric in shown)])
    return rows


def _names(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(entry["name"] for entry in results["summary"]))


def _entry(results: Mapping[str, Any], name: str, setting: Mapping[str, Any]) -> Row:
    """The summary of a row and setting; without metrics if it was not measured."""
    entries = (entry for entry in results["summary"] if entry["name"] == name and entry["setting"] == setting)
    return next(entries, {"metrics": {}})


def _cell(entry: Row, metric: str) -> str:
    value = entry["metrics"].get(metric)
    if value is None:
        # The test of a finished run may lack a slice, such as documents of a length.
        return "" if entry["metrics"] or entry.get("finished") else "failed"
    return f"{value['mean']:.3f}" + ("" if value["std"] is None else f" ± {value['std']:.3f}")


def markdown(results: Mapping[str, Any]) -> str:
    """The table in Markdown, with the command, the hardware and the chosen learning rates below it."""
    heading, *rows = table(results)
    lines = _lines(heading, rows)
    summary = results["summary"]
    seeds = max((value["runs"] for entry in summary for value in entry["metrics"].values()), default=0)
    over = "one seed" if seeds == 1 else f"mean over {seeds} seeds with the standard deviation"
    notes = [f"{results['report']}, {over}."]
    if failed := [entry for entry in summary if entry["failed"] and entry["metrics"]]:
        listed = ", ".join(f"{_label(entry)} ({entry['failed']} run(s))" for entry in failed)
        notes.append(f"Over fewer seeds or learning rates, as runs failed: {listed}.")
    if any(entry["learning_rate"] is not None for entry in summary):
        chosen = ", ".join(f"{_label(entry)} {entry['learning_rate']:g}" for entry in summary)
        shorter = ", by one shorter run each" if results.get("tries") else ""
        notes.append(f"The learning rate with the best {results['selected_by']}{shorter}: {chosen}.")
    notes.append(f"`` {results['command']} ``")
    effort = f"{results['training_seconds']:.0f} s of training in all, {results['jobs']} run(s) at a time"
    notes.append(f"{describe(results['measured'])}; {effort}.")
    costs, *of_rows = cost_table(results)
    return "\n\n".join([lines, *notes, _lines(costs, of_rows)]) + "\n"


def _lines(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *rows))


def _label(entry: Row) -> str:
    """A row and the setting of its column."""
    return entry["name"] + "".join(f" {key.rsplit('.', 1)[-1]}={value}" for key, value in entry["setting"].items())


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the table: a line for each row over the columns, or bars for a single column."""
    from matplotlib.figure import Figure

    shown = columns(results)
    values = {
        name: [_entry(results, name, setting)["metrics"].get(metric) for _, setting, metric in shown]
        for name in _names(results)
    }
    figure = Figure(figsize=(8, max(3.0, 0.3 * len(values) + 1.5)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if len(shown) == 1:
        known = {name: listed[0] for name, listed in values.items() if listed[0] is not None}
        ordered = sorted(known, key=lambda name: known[name]["mean"])
        means = [known[name]["mean"] for name in ordered]
        axes.barh(ordered, means, xerr=[known[name]["std"] or 0.0 for name in ordered])
        axes.set_xlabel(results["report"])
    else:
        for number, (name, listed) in enumerate(values.items()):
            found = {place: value for place, value in enumerate(listed) if value is not None}
            means = [value["mean"] for value in found.values()]
            errors = [value["std"] or 0.0 for value in found.values()]
            axes.errorbar(list(found), means, yerr=errors, label=name, capsize=2, **_style(number))
        axes.set_ylabel(results["report"])
        axes.set_xticks(range(len(shown)), [heading for heading, _, _ in shown], rotation=30, ha="right")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    if "accuracy" in results["report"]:
        (axes.set_xlim if len(shown) == 1 else axes.set_ylim)(0.0, 1.02)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def _style(number: int) -> dict[str, Any]:
    """The style of the line of a row: ten colours, then other dashes."""
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "marker": ".", "linewidth": 1}


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

    `equal_time` is the validation metric at the time that the fastest row takes in all, if a row has one by then: a run
    has trained in proportion to its updates, and the schedule of a slower one has not ended there.
    """
    entries = []
    for entry in results["summary"]:
        place = ("name", "setting", "learning_rate")
        chosen = [row for row in results["rows"] if "metrics" in row and all(row[key] == entry[key] for key in place)]
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


def cost_table(results: Mapping[str, Any]) -> list[list[str]]:
    """The heading and rows of the table of costs."""
    entries: Sequence[Row] = results["costs"]
    keys = [key for key in COSTS if any(key in entry for entry in entries)]
    timed = any("equal_time" in entry for entry in entries)
    last = [f"{results['selected_by']} at equal time"] if timed else []
    rows = [["model", *(COSTS[key] for key in keys), *last]]
    for entry in entries:
        cells = [f"{entry[key]:,.0f}" if key in entry else "" for key in keys]
        ending = [f"{entry['equal_time']:.3f}" if "equal_time" in entry else ""] if timed else []
        rows.append([_label(entry), *cells, *ending])
    return rows


def plot_curves(results: Mapping[str, Any], path: Path) -> None:
    """Draw the validation metric of each seed over updates and over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    for axes, place, label in zip(figure.subplots(1, 2, sharey=True), (0, 1), ("updates", "seconds"), strict=True):
        for number, entry in enumerate(results["costs"]):
            for seed, curve in enumerate(entry["curves"]):
                name = entry["name"] if seed == 0 else None
                axes.plot([one[place] for one in curve], [one[2] for one in curve], label=name, **_style(number))
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.axes[0].set_ylabel(results["selected_by"])
    figure.savefig(path)
