"""`longseq predict`: classify a file, or every file below a folder, into a csv or json file."""

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from longseq.files import replacing
from longseq.tasks import registry
from longseq.tasks.data.inputs import InputFiles, PassedOver, describe_passed_over
from longseq.tasks.devices import choose_device
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training import checkpoint
from longseq.tasks.training.command import CHECKPOINT_NEEDED, CommandKeys, read_command
from longseq.tasks.training.files import prepare_file
from longseq.tasks.training.options import Range, Required


class Prediction(NamedTuple):
    """The most probable classes of one file, best first."""

    path: str
    classes: list[tuple[str, float]]


@dataclass(frozen=True, kw_only=True)
class PredictKeys(CommandKeys):
    """The keys of `longseq predict`; conf/predict.yaml documents them."""

    checkpoint: Annotated[str | None, CHECKPOINT_NEEDED]
    input: Annotated[str | None, Required("give input=FILE or input=FOLDER: the file or files to classify")]
    output: str
    top_k: Annotated[int, Range(1)]
    batch_size: Annotated[int, Range(1)]
    num_workers: Annotated[int, Range(0)]
    device: str
    weights: Literal["auto", "ema", "model"]

    def __post_init__(self) -> None:
        if not self.output.endswith((".csv", ".json")):
            raise ValueError(f"output={self.output} must end in .csv or .json")


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, int]:
    """Classify `cfg.input` with `cfg.checkpoint`, write `cfg.output`, and return the counts of files."""
    keys = read_command(PredictKeys, cfg)
    assert keys.checkpoint is not None
    assert keys.input is not None
    output = Path(keys.output)
    prepare_file(output, reads=[keys.input])
    device = choose_device(keys.device)
    tasks = [name for name in registry.names() if registry.get(name).data.inputs is not None]
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, map_location=device, tasks=tasks)
    data = registry.get(loaded.task_name).data
    assert data.inputs is not None
    info: Any = data.info_class.from_dict(loaded.data)
    files = data.inputs(keys.input, info)
    loader = DataLoader(files, keys.batch_size, num_workers=keys.num_workers, collate_fn=files.collate)
    backbone = loaded.backbone.to(device).eval()
    predictions, unreadable = predict(backbone, loader, files, info.class_names, top_k=keys.top_k)
    if not predictions:
        raise ValueError(f"input={keys.input}: none of its {len(unreadable)} files can be read")
    passed_over = files.passed_over
    with replacing(output) as partial:
        (_write_csv if output.suffix == ".csv" else _write_json)(partial, predictions, unreadable, passed_over)
    more = f" ({describe_passed_over(passed_over, keys.input)})" if passed_over else ""
    unit = loaded.config.get("task", {}).get("unit", "files")  # a model without a run has no unit
    print(
        f"{len(predictions)} {unit} classified, {len(unreadable)} unreadable, {len(passed_over)} passed over{more}; "
        f"written to {output}"
    )
    return {"classified": len(predictions), "unreadable": len(unreadable), "passed_over": len(passed_over)}


@torch.inference_mode()
def predict(
    backbone: torch.nn.Module, loader: Any, files: InputFiles, class_names: Sequence[str], *, top_k: int = 5
) -> tuple[list[Prediction], list[str]]:
    """Predictions of the readable inputs of `loader`, in its order, and the paths of the others."""
    device = next(backbone.parameters()).device
    predictions, unreadable = [], []
    for batch, paths, failed in loader:
        unreadable += failed
        if not paths:
            continue
        probabilities = backbone(files.prepare(batch.to(device))).float().softmax(dim=1)
        values, classes = probabilities.topk(min(top_k, len(class_names)), dim=1)
        for path, row, indices in zip(paths, values.tolist(), classes.tolist(), strict=True):
            names = [class_names[index] for index in indices]
            predictions.append(Prediction(path, list(zip(names, row, strict=True))))
    return predictions, unreadable


def _write_csv(path: Path, predictions: list[Prediction], unreadable: list[str], passed_over: list[PassedOver]) -> None:
    width = max((len(prediction.classes) for prediction in predictions), default=1)
    ranks = range(1, width + 1)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["path", *(f"{column}_{rank}" for rank in ranks for column in ("class", "probability")), "error"]
        )
        for prediction in predictions:
            cells = [cell for name, value in prediction.classes for cell in (name, f"{value:.6f}")]
            writer.writerow([_in_utf8(prediction.path), *cells, ""])
        for failed in unreadable:
            writer.writerow([_in_utf8(failed), *[""] * (2 * width), "unreadable"])
        for other, reason in passed_over:
            writer.writerow([_in_utf8(other), *[""] * (2 * width), f"passed over: {reason}"])


def _write_json(
    path: Path, predictions: list[Prediction], unreadable: list[str], passed_over: list[PassedOver]
) -> None:
    rows = [
        {
            "path": _in_utf8(p.path),
            "classes": [{"class": name, "probability": round(value, 6)} for name, value in p.classes],
        }
        for p in predictions
    ]
    others = [one._asdict() | {"path": _in_utf8(one.path)} for one in passed_over]
    written = {"predictions": rows, "unreadable": list(map(_in_utf8, unreadable)), "passed_over": others}
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _in_utf8(path: str) -> str:
    """A path whose bytes Python has decoded by the locale, which may not be UTF-8, as its name in UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")
