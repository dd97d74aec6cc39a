"""`longseq evaluate`: measure a checkpoint on its own data, or on other data of its kind."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from longseq.hub import is_on_hub
from longseq.tasks import registry
from longseq.tasks.commands import Evaluate
from longseq.tasks.config import read, read_part, spell
from longseq.tasks.report import Report, print_rows, quiet_libraries, shorten
from longseq.tasks.training import checkpoint as checkpoints
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.system import write_text
from longseq.tasks.training.trainer import build_trainer

_log = logging.getLogger(__name__)

EVALUATION_BATCH = 64  # the batch size if data.eval_batch_size is not given
# Keys of `data` that change how samples are read, but not the samples.
READING_KEYS = ("img_size", "crop_pct", "eval_batch_size", "num_workers", "on_error", "check")


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, float]:
    """Evaluate `cfg.checkpoint` on `cfg.split`; print the metrics, write them as json and return them."""
    config = resolve(cfg)
    keys = read(Evaluate, config)
    split, checkpoint = keys.split, keys.checkpoint
    changes = {key: value for key, value in keys.data.items() if value is not None}
    loaded = checkpoints.load(checkpoint, weights=keys.weights, tasks=registry.names())
    task = registry.get(loaded.task_name)
    changes = read_part(task.config.data, changes, "data")
    trained = task.data.info_class.from_dict(loaded.data)
    if changes.get("img_size") not in (None, loaded.data.get("img_size")):
        loaded = checkpoints.load(checkpoint, weights=keys.weights, tasks=registry.names(), any_resolution=True)
    output = Path(keys.output or _run_folder(checkpoint) / f"evaluation_{split}.json")
    trainer = build_trainer({**config, "output": output.parent})
    datamodule = task.data.for_evaluation(
        loaded.config, changes, split=split, trained=trained, batch_size=EVALUATION_BATCH
    )
    if changes.keys() <= {*READING_KEYS} and (change := datamodule.info.find_change(trained, split)):
        _log.warning("the data have changed: %s", change)
    module = task.module.from_config(loaded.config, loaded.backbone, datamodule.info, None)
    datamodule.trainer = trainer
    loader = datamodule.test_dataloader() if split == "test" else datamodule.val_dataloader()
    datamodule.test_dataloader = lambda: loader  # type: ignore[method-assign]
    (tested,) = trainer.test(module, datamodule=datamodule, verbose=False)
    metrics = {key.replace("test/", f"{split}/"): float(value) for key, value in tested.items()}
    measured = {"checkpoint": checkpoint, "weights": keys.weights, "split": split, "data": changes}
    _write(metrics, task.report, module, datamodule.info, measured, output)
    return metrics


def _run_folder(checkpoint: str) -> Path:
    """The run folder of a checkpoint; the working folder for a model on a hub."""
    if is_on_hub(checkpoint):
        return Path()
    folder = Path(checkpoint).resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


@rank_zero_only
def _write(
    metrics: dict[str, float], report: Report, module: Any, info: Any, measured: Mapping[str, Any], output: Path
) -> None:
    """Print and write the metrics, and the keys of the command that determine them."""
    split = measured["split"]
    counts = report.counts(module, info, split)
    written = {**counts, **metrics, **report.extras(module, info, split), "evaluated": measured}
    rows = [(f"data.{key}", spell(value)) for key, value in measured["data"].items()]
    rows += [(key, str(count)) for key, count in counts.items()]
    rows += [(key, f"{value:.4f}") for key, value in metrics.items()]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(written, indent=2) + "\n")
    print_rows([*rows, ("written", shorten(output))])
