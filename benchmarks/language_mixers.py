"""Keep a comparison of language models in this folder, with their perplexity on documents longer than in training:

python benchmarks/language_mixers.py COMPARISON LONG NAME TITLE [NOTE ...]

COMPARISON is the folder that `longseq compare` wrote (comparison=text). LONG is a folder of `longseq prepare`,
made with the same tokenizer, whose test documents have 32,768 tokens and more. Each model reads them in windows of that
length. Writes NAME.json, and NAME.png: the perplexity by the position of a token in its document. Models that were
measured before are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from comparison import by_seed
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from table import mean_of

from longseq.tasks import evaluate

HERE = Path(__file__).parent
WINDOW = 32_768
BATCH = 2  # windows
SHORTEST = 1024  # the first length of the table
BY_POSITION = "test/perplexity_by_position"


def measure_length(run: Path, long: str) -> list[dict[str, Any]]:
    """The perplexity of a run's best model by position in the long documents."""
    output = run / "long_documents.json"
    if not output.is_file():
        precision = OmegaConf.load(run / "config.yaml").trainer.precision
        words = [
            f"checkpoint={run / 'checkpoints' / 'best.ckpt'}",
            f"data.root={long}",
            f"data.window={WINDOW}",
            "data.packing=documents",
            f"data.eval_batch_size={BATCH}",
            f"trainer.precision={precision}",
            f"output={output}",
        ]
        with initialize_config_module("longseq.conf", version_base="1.3"):
            evaluate.run(compose("evaluate", words))
    return json.loads(output.read_text())[BY_POSITION]


def row(found: Sequence[Mapping[str, Any]], name: str, folder: Path, long: str) -> dict[str, Any]:
    """The cells of a mixer: the value of each seed, and the perplexity in the second half of each length."""
    first = found[0]["metrics"]
    cells: dict[str, Any] = {"mixer": name, "parameters": first["parameters"]}
    for key, digits in (("test/perplexity", 3), ("test/bits_per_byte", 4)):
        cells[key.replace("/", "_")] = by_seed(found, key, digits)
    for key, places in (("tokens_per_second", None), ("gpu_memory_gib", 2), ("seconds", None)):
        if measured := by_seed(found, key, places):  # runs from before a figure was kept lack it
            cells[key] = measured
    positions = {str(one["seed"]): measure_length(folder / one["folder"], long) for one in found}
    lengths = [part["to"] + 1 for part in next(iter(positions.values())) if part["to"] >= SHORTEST - 1]
    for length in lengths:
        cells[f"perplexity_to_{length}"] = {
            seed: round(next(part["perplexity"] for part in parts if part["to"] + 1 == length), 2)
            for seed, parts in positions.items()
        }
    return {**cells, "by_position": positions, "measured": found[0]["measured"]}


def plot(rows: Sequence[Mapping[str, Any]], trained: int, file: Path) -> None:
    """Draw the mean perplexity over seeds by position, each mixer a line; the end of training windows is marked."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), dpi=120)
    for line in rows:
        parts = list(zip(*line["by_position"].values(), strict=True))
        places = [group[0]["to"] + 1 for group in parts]
        means = [sum(part["perplexity"] for part in group) / len(group) for group in parts]
        shown = [index for index, place in enumerate(places) if place >= 64]
        axes.plot([places[i] for i in shown], [means[i] for i in shown], marker="o", markersize=3, label=line["mixer"])
    axes.axvline(trained, color="0.6", linestyle="--", linewidth=1)
    axes.annotate("length in training", (trained, 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="position in the document (tokens)", ylabel="perplexity")
    axes.set_xscale("log", base=2)  # it puts formatters of its own
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("long")
    parser.add_argument("name")
    parser.add_argument("title")
    parser.add_argument("notes", nargs="*")
    options = parser.parse_args()
    folder, name = options.comparison, options.name
    results = json.loads((folder / "results.json").read_text())
    finished = [one for one in results["rows"] if one["status"] == "finished"]
    names = dict.fromkeys(one["name"] for one in finished)
    rows = [row([one for one in finished if one["name"] == mixer], mixer, folder, options.long) for mixer in names]
    rows.sort(key=lambda row: mean_of(row["test_perplexity"]))
    missing = [one["name"] for one in results["rows"] if one["status"] != "finished"]
    kept = {
        "what": options.title,
        "command": f"{results['command']}; python benchmarks/language_mixers.py FOLDER LONG {name} TITLE",
        "kind": "accuracy and speed",
        "rows": [{key: value for key, value in one.items() if key != "by_position"} for one in rows],
        "notes": [
            f"perplexity to N: of tokens at positions N/2 to N of documents with {WINDOW:,} tokens and more, read in "
            f"windows of {WINDOW:,}; training windows had 2,048. The plot: {name}.png.",
            *([f"Not finished: {', '.join(missing)}."] if missing else []),
            *options.notes,
        ],
    }
    (HERE / f"{name}.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    plot(rows, 2048, HERE / f"{name}.png")


if __name__ == "__main__":
    main()
