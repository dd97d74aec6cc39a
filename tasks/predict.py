"""`longseq predict`: classify a file, or every file below a folder, into a csv or json file."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from longseq.files import replacing
from longseq.tasks import registry
from longseq.tasks.circumstances import choose_device
from longseq.tasks.commands import Predict
from longseq.tasks.data.module import Inputs, Prediction, Unreadable
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training import checkpoint
from longseq.tasks.training.configuration import read_command

Found = Iterator[Prediction | Unreadable]


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, int]:
    """Classify `cfg.input` with `cfg.checkpoint`, write `cfg.output`, and return the counts of inputs."""
    keys = read_command(Predict, cfg)
    device = choose_device(keys.device)
    tasks = [name for name in registry.names() if registry.get(name).data.inputs is not None]
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, map_location=device, tasks=tasks)
    data = registry.get(loaded.task_name).data
    assert data.inputs is not None
    inputs = data.inputs.open(keys.input, data.info_class.from_dict(loaded.data), keys)
    output = Path(keys.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), replacing(output) as partial:
        found = inputs.predict(loaded.backbone.to(device).eval(), keys)
        if output.suffix == ".csv":
            delimiter = (loaded.config.get("data") or {}).get("label_delimiter") or ";"
            classified, failed = _write_csv(partial, found, inputs, delimiter)
        else:
            classified, failed = _write_json(partial, found, inputs)
    unreadable = f"{len(failed)} unreadable"
    if failed:
        unreadable += f" (the first: {failed[0].path}: {failed[0].reason})"
    unit = loaded.config.get("task", {}).get("unit", inputs.unit)
    print(f"{classified} {unit} classified, {unreadable}; written to {output}")
    return {"classified": classified, "unreadable": len(failed)}


def _write_csv(path: Path, found: Found, inputs: Inputs, delimiter: str) -> tuple[int, list[Unreadable]]:
    """Write predictions as they come, then the unreadable inputs.

    `delimiter` separates several labels in a cell. Returns the number of predictions, and the unreadable inputs.
    """
    failed: list[Unreadable] = []
    classified, width = 0, 1

    def cells_of(one: Prediction | Unreadable) -> list[Any]:
        values = [one.details.get(name, "") for name in inputs.details]
        return [one.path, *(delimiter.join(value) if isinstance(value, list) else value for value in values)]

    def write_header() -> None:
        columns = [f"{column}_{rank}" for rank in range(1, width + 1) for column in ("class", "probability")]
        writer.writerow(["path", *inputs.details, *columns, "error"])

    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for one in found:
            if isinstance(one, Unreadable):
                failed.append(one)
                continue
            if not classified:
                width = len(one.classes)
                write_header()
            classified += 1
            cells = [cell for name, value in one.classes for cell in (name, f"{value:.6f}")]
            writer.writerow([*cells_of(one), *cells, ""])
        if not classified:
            write_header()
        for one in failed:
            writer.writerow([*cells_of(one), *[""] * (2 * width), one.reason])
    return classified, failed


def _write_json(path: Path, found: Found, inputs: Inputs) -> tuple[int, list[Unreadable]]:
    """Write an object with `predictions` and `unreadable`. Returns as `_write_csv`."""
    predictions: list[dict[str, Any]] = []
    failed: list[Unreadable] = []
    for one in found:
        if isinstance(one, Unreadable):
            failed.append(one)
            continue
        classes = [{"class": name, "probability": round(value, 6)} for name, value in one.classes]
        predictions.append({"path": one.path, **one.details, "classes": classes})
    unreadable: list[Any] = [one.path for one in failed]
    if inputs.details:
        unreadable = [{"path": one.path, **one.details, "reason": one.reason} for one in failed]
    content = {"predictions": predictions, "unreadable": unreadable}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return len(predictions), failed
