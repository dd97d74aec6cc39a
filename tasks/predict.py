"""`longseq predict`: classify a file, or every file below a folder, into a csv or json file."""

import csv
import json
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from longseq.files import Kind, json_keys, replacing
from longseq.tasks import registry
from longseq.tasks.commands import Predict
from longseq.tasks.data.folders import named_file, written_name
from longseq.tasks.data.inputs import Inputs, Prediction, Unreadable, describe_passed_over
from longseq.tasks.devices import choose_device, memory_explained
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training import checkpoint
from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.files import prepare_file, prepare_folder

_log = logging.getLogger(__name__)

_BETWEEN = ";"  # what stands between several labels in a cell, unless the labels of the training had another mark


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, int]:
    """Classify `cfg.input` with `cfg.checkpoint`, write `cfg.output`, and return the counts of inputs."""
    keys = read_command(Predict, cfg)
    assert keys.checkpoint is not None
    assert keys.input is not None
    output = Path(keys.output)
    prepare_file(output, _PREDICTIONS, reads=[keys.input, keys.checkpoint])
    if keys.saliency is not None:
        prepare_folder(Path(keys.saliency), "saliency", apart_from=Path(keys.input))
    device = choose_device(keys.device)
    tasks = [name for name in registry.names() if registry.get(name).data.inputs is not None]
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, map_location=device, tasks=tasks)
    data = registry.get(loaded.task_name).data
    assert data.inputs is not None
    inputs = data.inputs.open(keys.input, data.info_class.from_dict(loaded.data), keys)
    between = (loaded.config.get("data") or {}).get("label_delimiter") or _BETWEEN
    if output.suffix == ".csv" and loaded.data.get("multi_label"):
        _warn_of_names(loaded.data["class_names"], between)
    found = inputs.predict(loaded.backbone.to(device).eval(), keys)
    names = _Names()
    write = partial(_write_csv, between=between) if output.suffix == ".csv" else _write_json
    with (
        torch.inference_mode(),
        memory_explained("batch_size", keys.batch_size),
        replacing(output) as unfinished,
    ):
        classified, failed = write(unfinished, found, inputs, names)
        unreadable = len(failed)
        first = f"{written_name(failed[0].path)}: {failed[0].reason}" if failed else ""
        if not classified:
            raise ValueError(
                f"input={keys.input}: not one of its {unreadable} {inputs.unit} can be classified: {first}"
            )
    passed_over = inputs.passed_over
    more = f" ({describe_passed_over(passed_over, keys.input)})" if passed_over else ""
    unit = loaded.config.get("task", {}).get("unit", inputs.unit)
    for line in inputs.notes():
        print(line)
    if names.addresses:
        print(
            f"{names.addresses} names are no UTF-8, and {output} has them as addresses, file:///...: "
            "longseq.tasks.data.folders.named_file gives the path of one"
        )
    print(
        f"{classified} {unit} classified, {unreadable} unreadable{f' (the first: {first})' if failed else ''}, "
        f"{len(passed_over)} passed over{more}; "
        f"written to {output}"
    )
    return {"classified": classified, "unreadable": unreadable, "passed_over": len(passed_over)}


def _warn_of_names(names: Sequence[str], between: str) -> None:
    """Say that a cell of several labels cannot be divided where a label has in it what stands between them."""
    if found := next((name for name in names if between in name), None):
        _log.warning(
            "the label %r holds the %r that stands between labels in the column decision: output=FILE.json keeps "
            "them apart",
            found,
            between,
        )


class _Names:
    """Paths as they are written, and the number of those that have to be written as addresses."""

    def __init__(self) -> None:
        self.addresses = 0

    def write(self, path: str) -> str:
        name = written_name(path)
        self.addresses += named_file(name) != name
        return name


def _write_csv(
    path: Path, found: Iterator[Prediction | Unreadable], inputs: Inputs, names: _Names, *, between: str
) -> tuple[int, list[Unreadable]]:
    """Write predictions as they come, then the inputs that cannot be read, then what was passed over.

    `between` stands between several labels in a cell.

    Returns the number of predictions, and the inputs that cannot be read.
    """
    failed: list[Unreadable] = []
    classified, width = 0, 1
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for one in found:
            if isinstance(one, Unreadable):
                failed.append(one)
                continue
            if not classified:
                width = len(one.classes)
                _write_header(writer, inputs.details, width)
            classified += 1
            cells = [cell for name, value in one.classes for cell in (name, f"{value:.6f}")]
            writer.writerow([names.write(one.path), *_cells(one, inputs.details, between), *cells, ""])
        if not classified:
            _write_header(writer, inputs.details, width)
        others = [Unreadable(path, f"passed over: {reason}") for path, reason in inputs.passed_over]
        for other in (*failed, *others):
            writer.writerow(
                [names.write(other.path), *_cells(other, inputs.details, between), *[""] * (2 * width), other.reason]
            )
    return classified, failed


def _holds_predictions(path: Path) -> bool:
    if path.suffix == ".json":
        return {"predictions", "unreadable", "passed_over"} <= json_keys(path)
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            columns = next(csv.reader(file), [])
        except csv.Error:  # a NUL in Python 3.10, a cell of more than 128 KiB
            return False
    return columns[:1] == ["path"] and {"class_1", "probability_1"} <= set(columns)


_PREDICTIONS = Kind("predictions", _holds_predictions)


def _write_header(writer: Any, details: Sequence[str], width: int) -> None:
    columns = [f"{column}_{rank}" for rank in range(1, width + 1) for column in ("class", "probability")]
    writer.writerow(["path", *details, *columns, "error"])


def _cells(one: Prediction | Unreadable, details: Sequence[str], between: str) -> list[Any]:
    values = [one.details.get(name, "") for name in details]
    return [between.join(value) if isinstance(value, list) else value for value in values]


def _write_json(
    path: Path, found: Iterator[Prediction | Unreadable], inputs: Inputs, names: _Names
) -> tuple[int, list[Unreadable]]:
    """Write one object: the predictions, the inputs that cannot be read, and what was passed over.

    Returns the number of predictions, and the inputs that cannot be read.
    """
    predictions: list[dict[str, Any]] = []
    failed: list[Unreadable] = []
    told: list[Any] = []
    for one in found:
        if isinstance(one, Prediction):
            classes = [{"class": name, "probability": round(value, 6)} for name, value in one.classes]
            predictions.append({"path": names.write(one.path), **one.details, "classes": classes})
        else:
            # Without details the path alone is told; the command prints the first reason.
            failed.append(one)
            facts = {"path": names.write(one.path), **one.details, "reason": one.reason}
            told.append(facts if inputs.details else facts["path"])
    passed_over = [one._asdict() | {"path": names.write(one.path)} for one in inputs.passed_over]
    written = {"predictions": predictions, "unreadable": told, "passed_over": passed_over}
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return len(predictions), failed
