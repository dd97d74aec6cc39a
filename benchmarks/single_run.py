"""Add one run of `longseq train task=document` to a comparison that is kept in this folder:

python benchmarks/single_run.py RUN MEASURED.json NAME LABEL COMMAND

RUN is the folder of the run, and MEASURED.json has the circumstances of its host, as `longseq compare` writes them for
each run. The row LABEL of NAME.json gets COMMAND and the accuracies of the run, over all documents and by length. A row
of that label is replaced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

HERE = Path(__file__).parent
ACCURACY = "test/accuracy"


def row(metrics: Mapping[str, Any], seed: int, label: str, command: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of a run, in the form of benchmarks/comparison.py."""
    names = {key: key.removeprefix(f"{ACCURACY}_") for key in metrics if key.startswith(ACCURACY)}
    accuracies = {name: {str(seed): round(metrics[key], 4)} for key, name in names.items()}
    cost = {"parameters": metrics["parameters"], "seconds_a_run": round(metrics["seconds"])}
    return {"mixer": label, "command": command, **accuracies, **cost, "measured": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("measured")
    parser.add_argument("name")
    parser.add_argument("label")
    parser.add_argument("command")
    options = parser.parse_args()
    file, run = HERE / f"{options.name}.json", options.run
    kept = json.loads(file.read_text())
    metrics, measured = (
        json.loads(Path(one).read_text(encoding="utf-8")) for one in (run / "metrics.json", options.measured)
    )
    found = row(metrics, OmegaConf.load(run / "config.yaml").seed, options.label, options.command, measured)
    kept["rows"] = [*(one for one in kept["rows"] if one["mixer"] != options.label), found]
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
