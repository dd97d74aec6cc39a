"""`longseq harness`: measure a language model on the tasks of lm-evaluation-harness, also without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longseq.tasks.circumstances import choose_device
from longseq.tasks.commands import Harness
from longseq.tasks.report import print_rows, quiet_libraries, shorten
from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.system import write_text


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, Any]:
    """Measure `cfg.checkpoint` on `cfg.tasks`; print the results, write them as JSON and return them."""
    from longseq.tools.harness.evaluation import evaluate, load_tasks
    from longseq.tools.harness.workers import Workers

    keys = read_command(Harness, cfg)
    folder = Path(keys.checkpoint).resolve()
    output = Path(keys.output or (folder if folder.is_dir() else folder.parent) / "harness.json")
    device = choose_device(keys.device)
    first = device.index or 0
    gpus = [f"cuda:{first + index}" for index in range(keys.devices)]
    with Workers(
        keys.checkpoint,
        gpus if device.type == "cuda" else [str(device)],
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
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(written, indent=2, default=str) + "\n")
    print_rows([*_table(results), ("written", shorten(output), "", "")])
    return written


def _table(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """A row for each metric of each task, then of each group."""
    rows = []
    for name, values in {**results["tasks"], **results["groups"]}.items():
        samples = values.get("samples")
        for metric, found in values["metrics"].items():
            value = f"{found['value']:.4f}"
            if found["stderr"] is not None:
                value += f" ± {found['stderr']:.4f}"
            rows.append((name, metric, value, f"of {samples}" if samples else ""))
    return rows
