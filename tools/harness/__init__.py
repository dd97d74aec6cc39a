"""`longseq harness`: measure a language model on the tasks of lm-evaluation-harness, also without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from longseq.files import Kind, json_keys
from longseq.tasks.commands import Harness
from longseq.tasks.devices import choose_device
from longseq.tasks.report import print_rows, quiet_libraries, shorten
from longseq.tasks.training import checkpoint, processes
from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.files import prepare_file, write_text
from longseq.tools.harness.names import check_names

_RESULTS = Kind("results of `longseq harness`", lambda path: {"lm_eval", "tasks", "groups"} <= json_keys(path))


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, Any]:
    """Measure `cfg.checkpoint` on `cfg.tasks`; print the results, write them as JSON and return them."""
    keys = read_command(Harness, cfg)
    assert keys.checkpoint is not None
    assert keys.tasks is not None
    if find_spec("lm_eval") is None:
        raise ValueError('longseq harness needs the library lm-eval: pip install "longseq[text]"')
    check_names(keys.tasks, keys.include)
    from longseq.tools.harness.evaluation import evaluate, load_tasks
    from longseq.tools.harness.workers import Workers

    devices = _choose_devices(keys.device, keys.devices)
    if keys.output is None:
        checkpoint.refuse_hub(keys.checkpoint)
    folder = Path(keys.checkpoint).resolve()
    output = Path(keys.output or (folder if folder.is_dir() else folder.parent) / "harness.json")
    prepare_file(output, _RESULTS, reads=[keys.checkpoint])
    processes.follow_parent()
    with Workers(
        keys.checkpoint,
        devices,
        weights=keys.weights,
        dtype=keys.dtype,
        batch_size=keys.batch_size,
        modules=keys.plugins,
    ) as workers:
        loaded = load_tasks(keys.tasks, include=keys.include, root=keys.data.root, num_fewshot=keys.num_fewshot)
        results = evaluate(workers, loaded, keys.limit)
    written = {
        "checkpoint": keys.checkpoint,
        "num_fewshot": keys.num_fewshot,
        "limit": keys.limit,
        "dtype": keys.dtype,
        "lm_eval": metadata.version("lm_eval"),
        **results,
    }
    write_text(output, json.dumps(written, indent=2, default=str) + "\n")
    print_rows([*_table(results), ("written", shorten(output), "", "")])
    return written


def _choose_devices(name: str, count: int) -> list[str]:
    """The device of each process; of several GPUs those from the first one on. ValueError for more than there are."""
    device = choose_device(name)
    if device.type != "cuda":
        if count > 1:
            raise ValueError(f"devices={count} are GPUs, and device={name} is the processor here: give devices=1")
        return [str(device)]
    first = device.index or 0
    if first + count > torch.cuda.device_count():
        raise ValueError(f"devices={count}: this machine has {torch.cuda.device_count()} GPU(s)")
    return [f"cuda:{first + index}" for index in range(count)]


def _table(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """A row for each metric of each task, and of each group behind its tasks."""
    rows = []
    for name, values in {**results["tasks"], **results["groups"]}.items():
        samples = values.get("samples")
        for metric, found in values["metrics"].items():
            error = found["stderr"]
            told = "" if error is None else f"± {error:.4f}"
            rows.append((name, metric, f"{found['value']:.4f} {told}".strip(), f"of {samples}" if samples else ""))
    return rows
