"""Write the tables of the README in this folder, of the main README and of the pages of docs/ from the rows.

python benchmarks/table.py

A row is marked as older if changes.json names a later change of its mixer or operation that affects figures of its kind
(accuracy, speed, or both). Tables of kind "history" report the past and are not marked.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from report import format_mean, to_markdown

HERE = Path(__file__).parent
ABOVE = HERE.parent
OURS = ("ours", "triton", "torch", None)  # implementations that a change of ours can affect
# Changes, compiled kernels, and the history of launches.
NO_TABLES = ("changes", "compilations", "counted_launches")
SUBJECTS = ("mixer", "model", "op", "variant", "call", "recurrence", "overrides")
HEAD = """# Measured results

`python benchmarks/table.py` makes these tables from the JSON rows beside this page. An empty cell was not measured.
A cell with ± is the mean and the standard deviation over seeds, with the value of each seed behind it. A command
belongs to the commit of its rows. MIXER, SEED, SHAPE or TEXT stand for each that a table names; FOLDER is the folder of
the data.

"Changed since" numbers the changes of a row's layer or kernels after it was measured:

"""

Row = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text())


def list_tables() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.json") if path.stem not in NO_TABLES)


def changes() -> list[dict[str, Any]]:
    return json.loads((HERE / "changes.json").read_text())["changes"]


def find_later_changes(row: Row, kind: str, table: str = "") -> list[int]:
    """The numbers of the changes, counted from 1, that came after the row's commit and affect its figures.

    A change names mixers, operations and kinds of their inputs, whole tables, or the values that rows have under some
    keys, and the tasks that it spares: one of kernels over chunks leaves decoding as it was, whose steps have kernels
    of their own.
    """
    measured = row.get("measured", {})
    commit = measured.get("commit") or measured.get("recorded")
    if row.get("implementation") not in OURS or commit is None:
        return []
    then = datetime.fromisoformat(commit.split()[1])
    words = {word for key in SUBJECTS for word in re.findall(r"[a-z_0-9]+", str(row.get(key, "")).lower())}
    return [
        number
        for number, change in enumerate(changes(), 1)
        if set(kind.split(" and ")) & set(change["moves"])
        and (
            words & set(change["names"])
            or table in change.get("tables", ())
            or any(values.items() <= row.items() for values in change.get("rows", ()))
        )
        and row.get("task") not in change.get("spares", ())
        and datetime.fromisoformat(change["date"]) > then
    ]


def mark(name: str) -> dict[str, Any]:
    """The result, with a column of the changes since a row was measured if there are any."""
    result, rows = read(name), []
    for row in result["rows"]:
        later = find_later_changes(row, result["kind"], name)
        rows.append({**row, **({"changed_since": ", ".join(map(str, later))} if later else {})})
    return {**result, "rows": rows}


def results_page() -> str:
    results = [mark(name) for name in list_tables()]
    listed = [f"{n}. {one['what']} ({one['commit']}, {one['date'][:10]})" for n, one in enumerate(changes(), 1)]
    return "\n".join([HEAD + "\n".join(listed) + "\n", *(to_markdown(result) + "\n" for result in results)])


def draw(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def name_of(row: Row, kind: str, name: str, table: str = "") -> str:
    return name + (" (older)" if find_later_changes(row, kind, table) else "")


def mean(cell: Any) -> str:
    """A cell of a page: mean and standard deviation, without the value of each seed."""
    if isinstance(cell, Mapping):
        return format_mean(cell)
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def millions(count: int, beside: int | None = None) -> str:
    """The number of parameters, and its difference from that of the reference row if it is more than 2 %."""
    text = f"{count / 1e6:.2f}M" if count < 1e7 else f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.2f}B"
    if beside is None or abs(count / beside - 1) <= 0.02:
        return text
    return f"{text} ({100 * (count / beside - 1):+.0f} %)"


def surroundings(rows: Sequence[Row], seeds: int | None = None) -> str:
    """The circumstances of rows in one line: device, the versions that matter, commits; the page of results has the
    rest.
    """
    places: dict[str, list[str]] = {}
    for measured in (row["measured"] for row in rows):
        versions = [
            f"{name} {measured['versions'][name]}" for name in ("torch", "triton") if name in measured["versions"]
        ]
        device = ", ".join([measured.get("gpu") or measured["processor"], *versions])
        commit = (measured.get("commit") or measured.get("recorded") or "unknown").split()[0]
        commit = f"recorded in {commit}" if "recorded" in measured else f"commit {commit}"
        commits = places.setdefault(device, [])
        commits += [] if commit in commits else [commit]
    told = [f"{device} ({', '.join(commits)})" for device, commits in places.items()]
    count = {None: "", 1: "One seed. "}.get(seeds, f"{seeds} seeds. ")
    return f"\n{count}Measured on {'; '.join(told)}."


def most_seeds(rows: Sequence[Row]) -> int:
    return max(len(row["test_top1"]) for row in rows)


def trained(name: str, heading: str) -> str:
    """A table of runs of `longseq train`: size, accuracy, and speed where each run had a machine to itself."""
    result = read(name)
    rows, kind = result["rows"], result["kind"]
    beside = next((row for row in rows if row.get("model", row.get("mixer")) == "attention"), None)
    alone = all("training_images_per_second" in row for row in rows)
    lines = []
    for row in rows:
        size = millions(row["parameters"], beside["parameters"] if beside else None)
        short = f" ({len(row['test_top1'])} seeds)" if len(row["test_top1"]) < most_seeds(rows) else ""
        line = [name_of(row, kind, row.get("model", row.get("mixer"))), size, mean(row["test_top1"]) + short]
        lines.append([*line, f"{row['training_images_per_second']:,}"] if alone else line)
    columns = [heading, "parameters (compared with attention)", "test top-1", *(["training images/s"] if alone else [])]
    return draw(columns, lines) + "\n" + surroundings(rows, most_seeds(rows))


def language_models() -> str:
    result = read("language_models")
    rows = [row for row in result["rows"] if row["task"] == "text" and not row.get("recompute")]
    compiled = {row["mixer"]: row for row in rows if row.get("compile")}
    rows = [row for row in rows if not row.get("compile")]
    lengths = sorted({row["tokens"] for row in rows})
    beside = next(row["parameters"] for row in rows if row.get("mixer") == "attention")
    lines = []
    for name in dict.fromkeys(row.get("mixer", row["model"]) for row in rows):
        own = {row["tokens"]: row for row in rows if row.get("mixer", row["model"]) == name}
        first = own[lengths[0]]
        speeds = [f"{own[length]['training_tokens_per_s']:,}" if length in own else "" for length in lengths]
        speeds.append(f"{compiled[name]['training_tokens_per_s']:,}" if name in compiled else "")
        size = millions(first["parameters"], beside)
        older = any(find_later_changes(row, result["kind"]) for row in own.values())
        lines.append([name + " (older)" * older, size, *speeds, f"{first['training_gib']} GiB"])
    heading = ["mixer", "parameters (compared with attention)", *(f"{length:,} tokens" for length in lengths)]
    heading += [f"compiled, {lengths[0]:,}", "memory"]
    return draw(heading, lines) + "\n" + surroundings([*rows, *compiled.values()])


def compared() -> str:
    """Language models of one budget, each at the best of its learning rates; those with the fewest bits on prose first.

    The fastest row ends between two validations of the others, whose loss there is interpolated. A row that shared its
    GPU has no speed.
    """
    prose = read("text_prose")
    python = {row["model"]: row for row in read("text_python")["rows"]} if "text_python" in list_tables() else {}
    end = min(row["curve_val/loss"][-1][1] for row in prose["rows"] if "seconds" in row)
    lines = []
    for row in sorted(prose["rows"], key=bits):
        other = python.get(row["model"])
        _, seconds, losses = zip(*row["curve_val/loss"], strict=True)
        alone = "seconds" in row
        lines.append(
            [
                name_of(row, prose["kind"], row["model"], "text_prose"),
                f"{row['learning_rate']:g}",
                mean(row["test_bits_per_byte"]),
                mean(other["test_bits_per_byte"]) if other else "",
                f"{np.interp(end, seconds, losses):.3f}" if alone else "",
                row["tried_val/loss"],
                *(f"{row[key]:,}" if key in row else "" for key in ("state", "flops_per_token", "tokens_per_second")),
            ]
        )
    heading = ["mixer", "rate", "bits per byte, prose", "Python", "validation loss when the fastest row ends"]
    heading += ["rates tried, and their validation losses", "size of the state", "FLOPs a token", "tokens/s"]
    return draw(heading, lines) + "\n" + surroundings([*prose["rows"], *python.values()])


def context() -> str:
    """Losses of the same models beyond the length of their training, with less context, and on repetitions."""
    rows, name = read("text_context")["rows"], "text_context"
    lines = [[name_of(row, "accuracy", row["model"], name), *(row[key].split()[0] for key in CONTEXT)] for row in rows]
    return draw(["mixer", *CONTEXT.values()], lines) + "\n" + surroundings(rows)


def converted() -> str:
    """A transformer converted to recurrent mixers, next to these from scratch on the same tokens."""
    rows, name = read("text_conversion")["rows"], "text_conversion"
    lines = []
    for row, beside in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{one['test_bits_per_byte']:.3f} ({one['test_perplexity']:.1f})" for one in (row, beside)]
        lines.append([name_of(row, "accuracy", row["mixer"], name), *cells])
    return draw(["mixer", "converted: bits per byte (perplexity)", "from scratch"], lines) + "\n" + surroundings(rows)


CONTEXT = {
    "position 64": "32 to 63",
    "position 2048": "1,024 to 2,047",
    "position 4096": "2,048 to 4,095",
    "position 32768": "16,384 to 32,767",
    **{f"context {count}": f"last {count:,}" for count in (64, 256, 1024)},
    "context all": "all before",
    "pair within 64": "again after up to 64",
    "pair within 1024": "after 257 to 1,024",
    "pair within 4096": "after 1,025 to 4,096",
}


def bits(row: Row) -> float:
    return mean_of(row["test_bits_per_byte"])


def mean_of(values: Mapping[str, float]) -> float:
    """The mean over seeds."""
    return statistics.fmean(values.values())


def image_models() -> str:
    eager, compiled = read("image_models"), read("image_models_compiled")
    pixels = sorted({row["pixels"] for row in eager["rows"]})
    lines = []
    for size in ("tiny", "small"):
        own = [row for row in eager["rows"] if size in row["model"]]
        own.sort(key=lambda row: ("mixer" in row, row.get("mixer") != "attention"))
        beside = next(row["parameters"] for row in own if row.get("mixer") == "attention")
        for mixer in dict.fromkeys(row.get("mixer") for row in own):
            cells, older = [], False
            for result in (eager, compiled):
                found = {
                    row["pixels"]: row
                    for row in result["rows"]
                    if size in row["model"] and row.get("mixer") == mixer and "training_images_per_s" in row
                }
                cells += [f"{found[one]['training_images_per_s']:,}" if one in found else "" for one in pixels]
                older |= any(find_later_changes(row, result["kind"]) for row in found.values())
            parameters = next(row["parameters"] for row in own if row.get("mixer") == mixer)
            name = f"{size}, {mixer}" if mixer else f"timm's DeiT-{size.capitalize()}"
            lines.append([name + (" (older)" if older else ""), millions(parameters, beside), *cells])
    heading = ["model", "parameters (compared with attention)", *(f"{one:,} px" for one in pixels)]
    heading += [f"compiled, {one:,} px" for one in pixels]
    return draw(heading, lines) + "\n" + surroundings([*eager["rows"], *compiled["rows"]])


def columns_of(name: str, prefix: str | tuple[str, ...], heading: Callable[[str], str]) -> str:
    """A table of probes: a mixer in each row, and one column for each key of the rows that begins with `prefix`."""
    result = read(name)
    columns = [key for key in result["rows"][0] if key.startswith(prefix)]
    lines = [
        [name_of(row, result["kind"], row["mixer"], name), *(mean(row.get(column, "")) for column in columns)]
        for row in result["rows"]
    ]
    return draw(["mixer", *map(heading, columns)], lines) + "\n" + surroundings(result["rows"])


def tracking() -> str:
    """State tracking by group and tokens; products of permutations were measured for fewer mixers."""
    parity, permutations = read("state_tracking"), read("state_tracking_permutations")
    others = {row["mixer"]: row for row in permutations["rows"]}
    columns = {
        "tokens=64": "parity of 64",
        "tokens=256": "parity of 256",
        **{key: key for key in ("S3 of 16", "S3 of 64")},
    }
    lines = []
    for row in parity["rows"]:
        cells = {**others.get(row["mixer"], {}), **row}
        name = name_of(row, parity["kind"], row["mixer"], "state_tracking")
        lines.append([name, *(mean(cells.get(column, "")) for column in columns)])
    return draw(["mixer", *columns.values()], lines) + "\n" + surroundings([*parity["rows"], *permutations["rows"]])


def documents(name: str) -> str:
    """Accuracy of document classifiers, over all documents and by their length in tokens, and the cost of a run."""
    result = read(name)
    bins = list(dict.fromkeys(key for row in result["rows"] for key in row if key == "longer" or key[:6] == "up_to_"))
    beside = next((row for row in result["rows"] if row["mixer"] == "attention"), None)
    lines = []
    for row in sorted(result["rows"], key=lambda row: -mean_of(row["test/accuracy"])):
        size = millions(row["parameters"], beside and beside["parameters"]) if row.get("parameters") else ""
        cells = [mean(row.get(key, "")) for key in ("test/accuracy", *bins)]
        lines.append([name_of(row, result["kind"], row["mixer"], name), size, *cells, f"{row['seconds_a_run']:,}"])
    told = [key.replace("up_to_", "up to ") for key in bins]
    heading = ["mixer", "parameters (compared with attention)", "test accuracy", *told, "seconds of a run"]
    return draw(heading, lines) + "\n" + surroundings(result["rows"])


def packed() -> str:
    """Language models on documents of 300 tokens in one row, beside whole sequences of 2,048 tokens; and generation."""
    result = read("language_models")
    lines, used = [], []
    for mixer in dict.fromkeys(row["mixer"] for row in result["rows"] if row["task"] == "packed"):
        own = [row for row in result["rows"] if row.get("mixer") == mixer and not row.get("recompute")]
        whole = next(row for row in own if row["task"] == "text" and row["tokens"] == 2048)
        documents = next(row for row in own if row["task"] == "packed")
        decoding = {row["batch"]: row for row in own if row["task"] == "decoding"}
        speeds = (whole["training_tokens_per_s"], documents["training_tokens_per_s"])
        older = any(find_later_changes(row, result["kind"]) for row in (whole, documents, *decoding.values()))
        cells = [f"{speed:,}" for speed in speeds]
        memory = [f"{row['training_gib']} GiB" for row in (whole, documents)]
        lines.append([mixer + " (older)" * older, *cells, f"{100 * speeds[1] / speeds[0]:.0f} %", *memory])
        for batch in (1, 64):
            row = decoding.get(batch, {})
            lines[-1].append(" / ".join(f"{row[key]:,.0f}" for key in GENERATION if key in row))
        used += [whole, documents, *decoding.values()]
    heading = ["mixer", "tokens/s at 2,048", "documents of 300", "share", "memory at 2,048", "documents of 300"]
    heading += ["step / generation of one text, tokens/s", "of 64 texts"]
    return draw(heading, lines) + "\n" + surroundings(used)


GENERATION = ("decoding_graph_tokens_per_s", "generation_tokens_per_s")


SUMMARY = ("attention", "linear_attention", "gla", "gsa", "longhorn", "longhorn_exact", "mamba")
SUMMARY = (*SUMMARY, "mamba2", "deltanet", "gated_deltanet", "vla")


def better_width(row: Mapping[str, Any] | None) -> str:
    """The column of a row of Zoology's recall with the higher accuracy; there is none without a row."""
    columns = [key for key in row or () if key.startswith("d_model=")]
    return max(columns, key=lambda key: mean_of(row[key]), default="") if row else ""


def summary() -> str:
    """Accuracy, recall, compression of text and speed of mixers from four tables; a star marks an older figure."""
    trained = [row for row in read("language_models")["rows"] if row["task"] == "text"]
    trained = [row for row in trained if not row.get("recompute") and not row.get("compile")]
    speeds = {(row.get("mixer"), row["tokens"]): row for row in trained}
    accuracies = {row["model"]: row for row in read("cifar10")["rows"]}
    recalled = {row["mixer"].split()[0]: row for row in reversed(read("mqar_zoology")["rows"])}
    prose = {row["model"]: row for row in read("text_prose")["rows"]}
    used, lines = [], []
    for mixer in SUMMARY:
        found = (
            ("cifar10", "test_top1", accuracies.get(mixer)),
            ("mqar_zoology", better_width(recalled.get(mixer)), recalled.get(mixer)),
            ("text_prose", "test_bits_per_byte", prose.get(mixer)),
            ("language_models", "training_tokens_per_s", speeds.get((mixer, 2048))),
            ("language_models", "training_tokens_per_s", speeds.get((mixer, 32768))),
        )
        line = [f"`{mixer}`"]
        for table, key, row in found:
            if row is None:
                line.append("")
                continue
            value = f"{row[key]:,}" if isinstance(row[key], int) else mean(row[key])
            line.append(value + (" *" if find_later_changes(row, read(table)["kind"], table) else ""))
            used.append(row)
        lines.append(line)
    heading = ["`mixer=`", "CIFAR-10, top-1", "recall of 64 pairs", "prose, bits per byte", "tokens/s at 2,048"]
    return draw([*heading, "tokens/s at 32,768"], lines) + "\n" + surroundings(used)


TABLES: dict[str, Callable[[], str]] = {
    "imdb": lambda: documents("imdb"),
    "digits": lambda: trained("digits", "mixer"),
    "directions": lambda: columns_of("image_directions", ("digits", "CIFAR"), str),
    "cifar10": lambda: trained("cifar10", "model"),
    "compared": compared,
    "converted": converted,
    "context": context,
    "language_models": language_models,
    "image_models": image_models,
    "mad": lambda: columns_of("mad", "data=", lambda key: key.removeprefix("data=mad_").replace("_", " ")),
    "recall": lambda: columns_of("mqar_vla", "pairs=", lambda key: key.replace("=", " = ")),
    "packed": packed,
    "summary": summary,
    "tracking": tracking,
    "zoology": lambda: columns_of("mqar_zoology", "d_model=", lambda key: key.replace("d_model=", "width ")),
}

MARKER = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end of \1 -->\n", re.DOTALL)


def with_tables(page: Path) -> str:
    """The text of a page, with every table between its markers written anew."""
    made = MARKER.sub(
        lambda found: f"<!-- table {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end of {found[1]} -->\n",
        page.read_text(encoding="utf-8"),
    )
    if made.count("<!-- table ") != len(MARKER.findall(made)):
        raise ValueError(f"{page} has a table without its end: each needs <!-- table NAME --> and <!-- end of NAME -->")
    return made


def list_pages() -> dict[Path, Callable[[], str]]:
    """Every page with tables, and the function that writes it."""
    pages = [ABOVE / "README.md", *sorted((ABOVE / "docs" / "pages").glob("*.md"))]
    return {HERE / "README.md": results_page} | {page: partial(with_tables, page) for page in pages}


def main() -> None:
    for page, make in list_pages().items():
        page.write_text(make())


if __name__ == "__main__":
    main()
