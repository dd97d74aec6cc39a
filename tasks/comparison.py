"""The results of a comparison: the best learning rate of each row and setting, as a table and as a plot."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import inf, isfinite, isnan, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from longseq.tasks.circumstances import describe

Row = Mapping[str, Any]
SIDE_BY_SIDE = 0.3  # of the distance of two columns in a plot: the width over which the rows of a column are spread


def summarize(rows: Sequence[Row], report: str, selected_by: str, others: Collection[str] = ()) -> list[dict[str, Any]]:
    """For each row and setting the learning rate with the best mean of `selected_by`, and its metrics over the seeds.

    The runs state which values of a metric are better. A rate at which a run failed loses to one at which more runs
    finished. `metrics` holds the mean, the standard deviation (None for one seed) and the number of runs for `report`
    and for its slices, whose names begin with that of `report`; `others` are metrics of which that is true by chance.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['name']} {row['setting']}", []).append(row)
    return [_best(group, report, selected_by, others) for group in groups.values()]


def _best(group: Sequence[Row], report: str, selected_by: str, others: Collection[str]) -> dict[str, Any]:
    rates: dict[Any, list[Row]] = {}
    for row in group:
        rates.setdefault(row["learning_rate"], []).append(row)
    finished = {rate: [row["metrics"] for row in listed if "metrics" in row] for rate, listed in rates.items()}
    better = find_direction([one for listed in finished.values() for one in listed], selected_by)
    sign = -1 if better is False else 1
    merit = {
        rate: (len(listed), _merit([sign * metrics.get(selected_by, nan) for metrics in listed]) if listed else 0.0)
        for rate, listed in finished.items()
    }
    rate = max(merit, key=lambda candidate: merit[candidate])
    names = {
        key
        for metrics in finished[rate]
        for key, value in metrics.items()
        if is_number(value) and (key == report or (key.startswith(f"{report}_") and key not in others))
    }
    return {
        "name": group[0]["name"],
        "setting": group[0]["setting"],
        "learning_rate": rate,
        "finished": len(finished[rate]),  # at this rate
        "failed": sum(row["status"] != "finished" for row in group),
        "metrics": {
            # in the order of the first run, which is that of the slices
            key: _spread([metrics[key] for metrics in finished[rate] if key in metrics])
            for key in (finished[rate][0] if finished[rate] else ())
            if key in names
        },
    }


def _merit(values: Sequence[float]) -> float:
    """The mean of values of which higher ones are better; the lowest number where one of them is NaN."""
    # NaN is neither lower nor higher than a number, so that the first rate with one would stay the best.
    return -inf if any(map(isnan, values)) else fmean(values)


def is_number(value: Any) -> bool:
    """True for a metric; metrics.json also has lists, such as the perplexity by position."""
    return isinstance(value, int | float)


def find_direction(found: Sequence[Mapping[str, Any]], metric: str) -> bool | None:
    """True if higher values of a metric are better, as the metrics of finished runs state; None if they do not."""
    told = {metrics.get("higher_is_better", {}).get(metric) for metrics in found} - {None}
    return told.pop() if len(told) == 1 else None


def _spread(values: Sequence[float]) -> dict[str, Any]:
    # stdev fails for infinity, such as a perplexity beyond all numbers
    deviation = (round(stdev(values), 6) if all(map(isfinite, values)) else nan) if len(values) > 1 else None
    return {"mean": round(fmean(values), 6), "std": deviation, "runs": len(values)}


def columns(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """The columns of the table: heading, setting and metric; first the whole test, then each of several slices."""
    found: list[tuple[str, dict[str, Any], str]] = []
    report = results["report"]
    measured = [entry["setting"] for entry in results["summary"] if entry["metrics"]]
    for entry in results["summary"]:
        if not entry["metrics"] and entry["setting"] in measured:
            continue  # a row without finished runs knows no slices; the others name them
        slices = [key for key in entry["metrics"] if key != report]
        whole = [report] if report in entry["metrics"] or not slices else []
        if whole and len(slices) == 1:
            slices = []  # the only one has the whole test
        for metric in [*whole, *slices]:
            parts = [f"{key.rsplit('.', 1)[-1]}={value}" for key, value in entry["setting"].items()]
            parts += [metric.removeprefix(f"{report}_")] if metric != report or not parts else []
            column = (", ".join(parts), entry["setting"], metric)
            if column not in found:
                found.append(column)
    return found


def table(results: Mapping[str, Any]) -> list[list[str]]:
    """The heading and rows of the table; a cell is the mean over the seeds, with the standard deviation of several."""
    shown = columns(results)
    rows = [["model", *(heading for heading, _, _ in shown)]]
    for name in dict.fromkeys(entry["name"] for entry in results["summary"]):
        rows.append([name, *(_cell(_entry(results, name, setting), metric) for _, setting, metric in shown)])
    return rows


def _entry(results: Mapping[str, Any], name: str, setting: Mapping[str, Any]) -> Mapping[str, Any]:
    """The summary of a row and setting; one without metrics if there is none."""
    entries = (entry for entry in results["summary"] if entry["name"] == name and entry["setting"] == setting)
    return next(entries, {"metrics": {}})


def _cell(entry: Mapping[str, Any], metric: str) -> str:
    value = entry["metrics"].get(metric)
    if value is None:
        # A finished run may lack a slice that its test does not have, such as documents of a length.
        return "" if entry["metrics"] or entry.get("finished") else "failed"
    return f"{value['mean']:.3f}" + ("" if value["std"] is None else f" ± {value['std']:.3f}")


def markdown(results: Mapping[str, Any]) -> str:
    """The table in Markdown, with the command, the hardware and the chosen learning rates below it."""
    heading, *rows = table(results)
    lines = [" | ".join(heading), " | ".join(["---"] * len(heading)), *(" | ".join(row) for row in rows)]
    text = "\n".join(f"| {line} |" for line in lines)
    seeds = max((value["runs"] for entry in results["summary"] for value in entry["metrics"].values()), default=0)
    notes = [f"{results['report']}, mean over {seeds} seed(s) with the standard deviation."]
    if failed := [entry for entry in results["summary"] if entry["failed"] and entry["metrics"]]:
        told = ", ".join(f"{_setting(entry)} ({entry['failed']} run(s))" for entry in failed)
        notes.append(f"Over fewer seeds or learning rates, as runs failed: {told}.")
    if any(entry["learning_rate"] is not None for entry in results["summary"]):
        chosen = ", ".join(_chosen(entry) for entry in results["summary"])
        notes.append(f"The learning rate with the best {results['selected_by']}: {chosen}.")
    if "tokenizers" in results:
        told = ", ".join(results["tokenizers"])
        notes.append(f"The runs have other tokenizers ({told}): lengths and losses by token have other units, too.")
    if "other_data" in results:
        notes.append(f"Not of the same data: {results['other_data']}.")
    notes.append(_as_code(results["command"]))
    effort = f"{results['training_seconds']:.0f} s of training in all, {results['jobs']} run(s) at a time"
    notes.append(f"{describe(results['measured'])}; {effort}.")
    return text + "\n\n" + "\n\n".join(notes) + "\n"


def _as_code(text: str) -> str:
    """Text as code in Markdown, between more backticks than it has itself."""
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (1 + max(map(len, re.findall("`+", text))))
    return f"{fence} {text} {fence}"


def _chosen(entry: Mapping[str, Any]) -> str:
    return f"{_setting(entry)} {entry['learning_rate']:g}"


def _setting(entry: Mapping[str, Any]) -> str:
    """A row and the setting of its column."""
    return entry["name"] + "".join(f" {key.rsplit('.', 1)[-1]}={value}" for key, value in entry["setting"].items())


def require_matplotlib() -> None:
    """Raise ValueError with the remedy if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError('plot.png needs matplotlib: pip install "longseq[plot]", or give plot=false') from None


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the table: a line for each row over the columns, or bars for a single column."""
    from matplotlib.figure import Figure

    shown = columns(results)
    names = list(dict.fromkeys(entry["name"] for entry in results["summary"]))
    values = {
        name: [_entry(results, name, setting)["metrics"].get(metric) for _, setting, metric in shown] for name in names
    }
    figure = Figure(figsize=(8, max(3.0, 0.3 * len(names) + 1.5)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if len(shown) == 1:
        found = [row["metrics"] for row in results["rows"] if "metrics" in row]
        upwards = find_direction(found, results["report"]) is not False
        _draw_bars(axes, {name: listed[0] for name, listed in values.items()}, upwards)
        axes.set_xlabel(results["report"])
    else:
        _draw_lines(axes, values)
        axes.set_ylabel(results["report"])
        axes.set_xticks(range(len(shown)), [heading for heading, _, _ in shown], rotation=30, ha="right")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    if "accuracy" in results["report"]:
        (axes.set_xlim if len(shown) == 1 else axes.set_ylim)(0.0, 1.02)
    axes.grid(alpha=0.3)
    partial = path.with_name(f"partial_{path.name}")
    figure.savefig(partial)
    partial.replace(path)


def _draw_bars(axes: Any, values: Mapping[str, Row | None], upwards: bool) -> None:
    """Draw bars with the best value on top."""
    known = {name: value for name, value in values.items() if value is not None}
    ordered = sorted(known, key=lambda name: known[name]["mean"], reverse=not upwards)
    axes.barh(ordered, [known[name]["mean"] for name in ordered], xerr=[known[one]["std"] or 0.0 for one in ordered])


def _draw_lines(axes: Any, values: Mapping[str, Sequence[Row | None]]) -> None:
    """Draw a line for each row. Where there are deviations, rows stand side by side, so that each can be read."""
    styles = ("-", "--", ":")
    spread = any(value is not None and value["std"] for listed in values.values() for value in listed)
    apart = SIDE_BY_SIDE / len(values) if spread else 0.0
    for number, (name, listed) in enumerate(values.items()):
        aside = apart * (number - (len(values) - 1) / 2)
        places = [place + aside for place, value in enumerate(listed) if value is not None]
        means = [value["mean"] for value in listed if value is not None]
        errors = [value["std"] or 0.0 for value in listed if value is not None]
        style = {"color": f"C{number % 10}", "linestyle": styles[number // 10 % 3], "marker": "o", "markersize": 4}
        axes.errorbar(places, means, yerr=errors, label=name, capsize=2, **style)
