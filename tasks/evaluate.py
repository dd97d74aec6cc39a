"""`longseq evaluate`: evaluate a checkpoint on its own data or on other data of the same classes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from longseq.tasks import registry
from longseq.tasks.experiment import check_trainer
from longseq.tasks.report import Report, print_rows, quiet_libraries, shorten
from longseq.tasks.training import checkpoint as checkpoints
from longseq.tasks.training import processes
from longseq.tasks.training.callbacks.stop import StopTogether, stoppable
from longseq.tasks.training.callbacks.unreadable import UnreadableSamples
from longseq.tasks.training.command import CHECKPOINT_NEEDED, CommandKeys
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.files import prepare_file, write_text
from longseq.tasks.training.options import read, read_part
from longseq.tasks.training.trainer import build_trainer

# The batch size if data.eval_batch_size is not given.
EVALUATION_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class EvaluateKeys(CommandKeys):
    """The keys of `longseq evaluate`; conf/evaluate.yaml documents them."""

    checkpoint: Annotated[str | None, CHECKPOINT_NEEDED]
    weights: Literal["auto", "ema", "model"]
    split: Literal["test", "val"]
    output: str | None
    data: Mapping[str, Any]
    trainer: Mapping[str, Any]


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, float]:
    """Evaluate `cfg.checkpoint` on `cfg.split`; print the metrics, write them as json and return them."""
    processes.follow_parent()
    config = resolve(cfg)
    keys = read(EvaluateKeys, config)
    split, checkpoint = keys.split, keys.checkpoint
    assert checkpoint is not None
    check_trainer(keys.trainer)
    changes = {key: value for key, value in keys.data.items() if value is not None}
    loaded = checkpoints.load(checkpoint, weights=keys.weights, tasks=registry.names())
    task = registry.get(loaded.task_name)
    changes = read_part(task.config.data, changes, "data")
    output = Path(keys.output or _beside(Path(checkpoint)) / f"evaluation_{split}.json")
    prepare_file(output)
    unit = loaded.config.get("task", {}).get("unit", "samples")
    trainer = build_trainer(config, [StopTogether(), UnreadableSamples(unit=unit)])
    trained = task.data.info_class.from_dict(loaded.data)
    if options := task.model.load_options(trained, changes):
        loaded = checkpoints.load(checkpoint, weights=keys.weights, tasks=registry.names(), **options)
    datamodule = task.data.for_evaluation(
        loaded.config, changes, split=split, trained=trained, batch_size=EVALUATION_BATCH
    )
    task.model.check_reads(loaded.backbone, trained, datamodule.info)
    module = task.module.from_config(loaded.config, loaded.backbone, datamodule.info, None)
    datamodule.trainer = trainer
    loader = datamodule.test_dataloader() if split == "test" else datamodule.val_dataloader()
    datamodule.test_dataloader = lambda: loader  # type: ignore[method-assign]
    with stoppable():
        (tested,) = trainer.test(module, datamodule=datamodule, verbose=False)
    metrics = {key.replace("test/", f"{split}/"): float(value) for key, value in tested.items()}
    _write(metrics, task.report, module, datamodule.info, split, output)
    return metrics


def _beside(checkpoint: Path) -> Path:
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


@rank_zero_only
def _write(metrics: dict[str, float], report: Report, module: Any, info: Any, split: str, output: Path) -> None:
    counts = report.counts(module, info, split)
    written = {**counts, **metrics, **report.extras(module, info, split)}
    rows = [(key, str(count)) for key, count in counts.items()]
    rows += [(key, f"{value:.4f}") for key, value in metrics.items()]
    write_text(output, json.dumps(written, indent=2) + "\n")
    print_rows([*rows, ("written", shorten(output))])
