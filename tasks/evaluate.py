"""`longseq evaluate`: evaluate a checkpoint on its own data, on other data of its kind, or on each document of text."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from longseq.files import Kind, json_keys
from longseq.tasks import registry
from longseq.tasks.commands import Evaluate
from longseq.tasks.devices import memory_explained
from longseq.tasks.experiment import check_trainer
from longseq.tasks.report import Report, print_rows, quiet_libraries, shorten
from longseq.tasks.training import checkpoint as checkpoints
from longseq.tasks.training import processes
from longseq.tasks.training.callbacks.agreement import Agreement
from longseq.tasks.training.callbacks.stop import StopTogether, stoppable
from longseq.tasks.training.callbacks.unreadable import UnreadableSamples
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.files import prepare_file, write_text
from longseq.tasks.training.options import read, read_part, spell
from longseq.tasks.training.peers import watched
from longseq.tasks.training.trainer import build_trainer, refuse_nameless_program, refuse_other_processes

_log = logging.getLogger(__name__)

# The batch size if data.eval_batch_size is not given.
EVALUATION_BATCH = 64
# The keys of `data` that say how samples are read, and not which ones.
READING_KEYS = ("img_size", "crop_pct", "eval_batch_size", "num_workers", "on_error", "check")
# The tasks whose models `input` is for, and the keys of `data` that it reads.
DOCUMENT_TASKS = ("lm",)
DOCUMENT_KEYS = ("column", "prompt_column", "eval_batch_size")


def _is_evaluation(path: Path) -> bool:
    """True for a file of metrics that says what was evaluated. Those of earlier versions do not say it: they have the
    name that the command gives, and the metrics of the split in this name.
    """
    keys, split = json_keys(path), path.stem.removeprefix("evaluation_")
    return "evaluated" in keys or (path.stem != split and f"{split}/loss" in keys)


_EVALUATION = Kind("evaluation", _is_evaluation)
_DOCUMENTS = Kind("evaluation of documents", lambda path: json_keys(path) > {"document"})


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, float]:
    """Evaluate `cfg.checkpoint` on `cfg.split`; print the metrics, write them as json and return them."""
    processes.follow_parent()
    config = resolve(cfg)
    keys = read(Evaluate, config)
    split, checkpoint = keys.split, keys.checkpoint
    assert checkpoint is not None
    check_trainer(keys.trainer)
    refuse_other_processes(config)
    changes = {key: value for key, value in keys.data.items() if value is not None}
    if keys.input is not None:
        return _evaluate_documents(keys, config, changes)
    if keys.output is None:
        checkpoints.refuse_hub(checkpoint)
    loaded = checkpoints.load(checkpoint, weights=keys.weights, tasks=registry.names())
    task = registry.get(loaded.task_name)
    changes = read_part(task.config.data, changes, "data")
    processes.refuse_many(changes.get("num_workers"), "data.num_workers")
    output = Path(keys.output or _beside(checkpoint) / f"evaluation_{split}.json")
    _check_ending(output, ".json", "the metrics")
    prepare_file(output, _EVALUATION, reads=[checkpoint])
    unit = loaded.config.get("task", {}).get("unit", "samples")
    facts = {"split": split, "weights": keys.weights, "the update of the checkpoint": loaded.global_step}
    callbacks = [Agreement(facts), StopTogether(), UnreadableSamples(unit=unit)]
    # A profiler's report lies beside the metrics, and does not replace that of the training.
    trainer = build_trainer({**config, "output": output.parent}, callbacks, profile=f"profile_{output.stem}")
    refuse_nameless_program(trainer)
    trained = task.data.info_class.from_dict(loaded.data)
    if options := task.model.load_options(trained, changes):
        loaded = checkpoints.load(checkpoint, weights=keys.weights, tasks=registry.names(), **options)
    if loaded.task_name in DOCUMENT_TASKS and loaded.data.get("window_is_assumed") and "window" not in changes:
        _log.warning(
            "checkpoint=%s does not tell the length of its texts in training: windows of %d tokens are measured; "
            "data.window=N chooses others",
            checkpoint,
            loaded.data["window"],
        )
    datamodule = task.data.for_evaluation(
        loaded.config, changes, split=split, trained=trained, batch_size=EVALUATION_BATCH
    )
    task.model.check_reads(loaded.backbone, trained, datamodule.info)
    if changes.keys() <= {*READING_KEYS} and (change := datamodule.info.find_change(trained, split)):
        _log.warning("the data have changed: %s", change)
    module = task.module.from_config(loaded.config, loaded.backbone, datamodule.info, None)
    datamodule.trainer = trainer
    loader = datamodule.test_dataloader() if split == "test" else datamodule.val_dataloader()
    datamodule.test_dataloader = lambda: loader  # type: ignore[method-assign]
    with (
        stoppable(trainer),
        watched(trainer),
        memory_explained("data.eval_batch_size", datamodule.eval_batch_size),
    ):
        (tested,) = trainer.test(module, datamodule=datamodule, verbose=False)
    metrics = {key.replace("test/", f"{split}/"): float(value) for key, value in tested.items()}
    measured = {"checkpoint": checkpoint, "weights": keys.weights, "split": split, "data": changes}
    _write(metrics, task.report, module, datamodule.info, measured, output)
    return metrics


def _evaluate_documents(keys: Evaluate, config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, float]:
    """Write the log-probability of each document of `keys.input`; print the sums and return their metrics."""
    from longseq.tasks.lm.documents import score_documents
    from longseq.tasks.text.info import TextInfo
    from longseq.tasks.text.sources import TEXT, Columns, find_parts

    assert keys.checkpoint is not None
    assert keys.input is not None
    if keys.split != "test":
        raise ValueError(f"split={keys.split} has no effect: input is measured as a whole; leave one out")
    changes = read_part(registry.get(DOCUMENT_TASKS[0]).config.data, changes, "data")
    if unread := [key for key in changes if key not in DOCUMENT_KEYS]:
        raise ValueError(
            f"data.{unread[0]} is not read with input, which measures each document by itself: leave it out"
        )
    inputs = [keys.input] if isinstance(keys.input, str) else keys.input
    columns = Columns(changes.get("column", TEXT.text), changes.get("prompt_column"))
    output = Path(keys.output or _beside(keys.checkpoint) / f"evaluation_{Path(inputs[0]).stem}.jsonl")
    _check_ending(output, ".jsonl", "with input, a line a document")
    prepare_file(output, _DOCUMENTS, reads=[*inputs, keys.checkpoint])
    trainer = build_trainer(config)
    if trainer.world_size > 1:
        raise ValueError("input is read by one process: give trainer.devices=1")
    parts = find_parts(inputs, columns)
    loaded = checkpoints.load(keys.checkpoint, weights=keys.weights, tasks=registry.names())
    if loaded.task_name not in DOCUMENT_TASKS:
        raise ValueError(
            f"checkpoint={keys.checkpoint} belongs to task={loaded.task_name}, and input is text for a language model: "
            "give other data by their keys, such as data.root=FOLDER or data.test=FILE"
        )
    totals = score_documents(
        loaded.backbone.to(trainer.strategy.root_device),  # type: ignore[arg-type]
        TextInfo.from_dict(loaded.data).make_tokenizer(),
        parts,
        columns,
        output,
        batch_size=changes.get("eval_batch_size", EVALUATION_BATCH),
        context=trainer.precision_plugin.forward_context(),
    )
    metrics = totals.metrics()
    rows = [(name, str(getattr(totals, name))) for name in ("documents", "tokens", "bytes")]
    rows += [(name, f"{value:.4f}") for name, value in metrics.items()]
    rows += [("left out", f"{count} {name}") for name in ("malformed", "empty") if (count := getattr(totals, name))]
    rows += [("", told) for told in totals.named]
    print_rows([*rows, ("written", shorten(output))])
    return metrics


def _check_ending(output: Path, ending: str, content: str) -> None:
    if output.suffix != ending:
        raise ValueError(f"output={output} must end in {ending}: {content}")


def _beside(checkpoint: str) -> Path:
    checkpoints.refuse_hub(checkpoint)
    folder = Path(checkpoint).resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


@rank_zero_only
def _write(
    metrics: dict[str, float], report: Report, module: Any, info: Any, measured: Mapping[str, Any], output: Path
) -> None:
    """Print and write the metrics, and beside them what was measured: its `data` are keys that the command gave."""
    split = measured["split"]
    counts = report.counts(module, info, split)
    written = {**counts, **metrics, **report.extras(module, info, split), "evaluated": measured}
    rows = [(f"data.{key}", spell(value)) for key, value in measured["data"].items()]
    rows += [(key, str(count)) for key, count in counts.items()]
    rows += [(key, f"{value:.4f}") for key, value in metrics.items()]
    write_text(output, json.dumps(written, indent=2) + "\n")
    print_rows([*rows, ("written", shorten(output))])
