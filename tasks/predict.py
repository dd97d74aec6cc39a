"""`longseq predict`: classify a file, or every file below a folder, into a csv or json file."""

import csv
import json
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


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, int]:
    """Classify `cfg.input` with `cfg.checkpoint`, write `cfg.output`, and return the counts of inputs."""
    keys = read_command(Predict, cfg)
    device = choose_device(keys.device)
    tasks = [name for name in registry.names() if registry.get(name).data.inputs is not None]
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, map_location=device, tasks=tasks)
    data = registry.get(loaded.task_name).data
    assert data.inputs is not None
    inputs = data.inputs(keys.input, data.info_class.from_dict(loaded.data), keys)
    output = Path(keys.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    predictions: list[Prediction] = []
    failed: list[Unreadable] = []
    with torch.inference_mode():
        for one in inputs.predict(loaded.backbone.to(device).eval(), keys):
            if isinstance(one, Unreadable):
                failed.append(one)
            else:
                predictions.append(one)
    with replacing(output) as partial:
        if output.suffix == ".csv":
            delimiter = (loaded.config.get("data") or {}).get("label_delimiter") or ";"
            _write_csv(partial, predictions, failed, inputs, delimiter)
        else:
            _write_json(partial, predictions, failed, inputs)
    unreadable = f"{len(failed)} unreadable"
    if failed:
        unreadable += f" (the first: {failed[0].path}: {failed[0].reason})"
    unit = loaded.config.get("task", {}).get("unit", inputs.unit)
    print(f"{len(predictions)} {unit} classified, {unreadable}; written to {output}")
    return {"classified": len(predictions), "unreadable": len(failed)}


def _write_csv(
    path: Path, predictions: list[Prediction], failed: list[Unreadable], inputs: Inputs, delimiter: str
) -> None:
    """Write predictions, then the unreadable inputs.

    `delimiter` separates several labels in a cell.
    """
    width = len(predictions[0].classes) if predictions else 1
    columns = [f"{column}_{rank}" for rank in range(1, width + 1) for column in ("class", "probability")]
    rows: list[Prediction | Unreadable] = [*predictions, *failed]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", *inputs.details, *columns, "error"])
        for one in rows:
            values = [one.details.get(name, "") for name in inputs.details]
            own = [one.path, *(delimiter.join(value) if isinstance(value, list) else value for value in values)]
            if isinstance(one, Prediction):
                cells = [cell for name, value in one.classes for cell in (name, f"{value:.6f}")]
                writer.writerow([*own, *cells, ""])
            else:
                writer.writerow([*own, *[""] * (2 * width), one.reason])


def _write_json(path: Path, predictions: list[Prediction], failed: list[Unreadable], inputs: Inputs) -> None:
    """Write an object with `predictions` and `unreadable`."""
    predicted = []
    for one in predictions:
        classes = [{"class": name, "probability": round(value, 6)} for name, value in one.classes]
        predicted.append({"path": one.path, **one.details, "classes": classes})
    unreadable: list[Any] = [one.path for one in failed]
    if inputs.details:
        unreadable = [{"path": one.path, **one.details, "reason": one.reason} for one in failed]
    content = {"predictions": predicted, "unreadable": unreadable}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
