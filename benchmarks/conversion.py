"""Keep the fine-tuning of converted language models beside the same models from scratch:

python benchmarks/conversion.py RUNS OUTPUT.json

RUNS holds the run folders of `longseq train task=lm logger=csv` that MIXER.converted.RATE and MIXER.scratch.RATE name,
and the run `attention`, whose model was converted. Writes OUTPUT.json, and a plot of the validation losses beside it.
Run it on the host of the runs: the rows state their circumstances.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from command import run_script

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from longseq.tasks.devices import choose_device
from longseq.tools.benchmark.report import add_circumstances

STARTS = ("converted", "scratch")
LOSS = "val/loss"


def losses(run: Path) -> list[tuple[int, float]]:
    """The validation losses of a run and the updates after which they were measured."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        found = {int(row["step"]) + 1: float(row[LOSS]) for row in csv.DictReader(file) if row.get(LOSS)}
    return sorted(found.items())


def row(run: Path, mixer: str, start: str, rate: str) -> dict[str, Any]:
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    cells: dict[str, Any] = {"mixer": mixer, "start": start, "learning_rate": rate, "updates": metrics["updates"]}
    cells["parameters"] = metrics["parameters"]
    cells |= {f"validation_loss_at_{update}": round(loss, 4) for update, loss in losses(run)}
    cells["test_loss"] = round(metrics["test/loss"], 4)
    cells |= {key: metrics[key] for key in ("tokens_per_second", "seconds") if key in metrics}
    return cells


def read(folder: Path) -> list[tuple[Path, str, str, str]]:
    """Each finished run with its mixer, its start and its learning rate, those of one mixer together."""
    found = []
    for run in sorted(folder.iterdir()):
        mixer, _, rest = run.name.partition(".")
        start, _, rate = rest.partition(".")
        if start in STARTS and rate and (run / "metrics.json").is_file():
            found.append((run, mixer, start, rate))
    return found


def plot(runs: list[tuple[Path, str, str, str]], teacher: float, file: Path) -> None:
    mixers = list(dict.fromkeys(mixer for _, mixer, _, _ in runs))
    figure, axes = plt.subplots(1, len(mixers), figsize=(5 * len(mixers), 4), sharey=True, squeeze=False)
    for axis, chosen in zip(axes[0], mixers, strict=True):
        for run, mixer, start, rate in runs:
            if mixer == chosen:
                updates, values = zip(*losses(run), strict=True)
                style = "-" if start == "converted" else "--"
                axis.plot(updates, values, style, marker=".", label=f"{start}, rate {rate}")
        axis.axhline(teacher, color="gray", linewidth=0.8, label="attention, which was converted")
        axis.set(title=chosen, xlabel="updates")
        axis.legend()
    axes[0, 0].set_ylabel("validation loss")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    runs = read(folder)
    if not runs:
        sys.exit(f"{folder} has no finished run named MIXER.converted.RATE or MIXER.scratch.RATE")
    attention = row(folder / "attention", "attention", "scratch", "")
    best = min(loss for _, loss in losses(folder / "attention"))
    attention = {key: value for key, value in attention.items() if not key.startswith("validation_loss_at")}
    rows = [{**attention, "best_validation_loss": round(best, 4)}]
    rows += [{**row(*run), "best_validation_loss": round(min(x for _, x in losses(run[0])), 4)} for run in runs]
    result = {
        "what": "Language models converted from attention and fine-tuned, beside the same models from scratch",
        "command": "longseq convert source=FOLDER mixer=MIXER output=FOLDER; python benchmarks/conversion.py RUNS FILE",
        "kind": "accuracy",
        "rows": add_circumstances(rows, choose_device("auto")),
        "notes": [
            f"The plot: {output.stem}.png. converted: begins with the weights of the attention model in the first row, "
            "which was trained on the same text. scratch: the same model, options, tokens and recipe. One seed."
        ],
    }
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    plot(runs, best, output.with_suffix(".png"))


if __name__ == "__main__":
    run_script(main, __doc__)
