"""The runs of a comparison: each is a process of `longseq train`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig

from longseq.tasks.circumstances import find_circumstances
from longseq.tasks.training import runs
from longseq.tasks.training.configuration import spell_value
from longseq.tasks.training.recipe import device_count
from longseq.tasks.training.system import write_text

LOG_FILE, MEASURED_FILE = "log.txt", "measured.json"


class Trial(NamedTuple):
    """One run: its row in the table, setting (sweep), learning rate and seed, and how to train it."""

    name: str
    setting: dict[str, Any]
    learning_rate: float | None
    seed: int
    folder: Path
    overrides: list[str]
    config: dict[str, Any]

    def describe(self) -> str:
        """The trial in one line."""
        parts = [self.name, *(f"{key}={value}" for key, value in self.setting.items())]
        parts += [] if self.learning_rate is None else [f"learning rate {self.learning_rate:g}"]
        return f"{', '.join(parts)}, seed {self.seed}"


def find_places(config: Mapping[str, Any]) -> list[str]:
    """CUDA_VISIBLE_DEVICES for each run that fits on this machine at the same time; empty for runs on the CPU."""
    if config["trainer"].get("accelerator") == "cpu":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    size = device_count(config)
    return [",".join(visible[first : first + size]) for first in range(0, len(visible) - size + 1, size)]


def run_all(trials: Sequence[Trial], places: Sequence[str | None]) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Run the trials, one at a time in each of `places`; yield the index and the row of each when it ends.

    Closing the generator ends the runs, which then write their checkpoints.
    """
    waiting, free = list(enumerate(trials)), list(places)
    running: dict[subprocess.Popen[bytes], tuple[int, str | None]] = {}
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        while waiting or running:
            if waiting and free:
                index, trial = waiting.pop(0)
                if runs.finished(trial.folder) is None:
                    place = free.pop(0)
                    running[_start(trial, place, jobs=len(places))] = (index, place)
                else:
                    yield index, _row(trial, 0)
                continue
            for process in [one for one in running if one.poll() is not None]:
                index, place = running.pop(process)
                free.append(place)
                yield index, _row(trials[index], process.returncode)
            time.sleep(0.05)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _start(trial: Trial, place: str | None, *, jobs: int) -> subprocess.Popen[bytes]:
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    if place is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_text(trial.folder / MEASURED_FILE, json.dumps(find_circumstances(device_of(place))) + "\n")
    command = [
        sys.executable,
        sys.argv[0],
        "train",
        *config_folders(),
        *trial.overrides,
        "resume=true",
        f"hydra.run.dir={spell_value(str(trial.folder))}",
    ]
    with (trial.folder / LOG_FILE).open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def device_of(place: Any) -> torch.device:
    return torch.device("cuda" if place and torch.cuda.is_available() else "cpu")


def _row(trial: Trial, code: int) -> dict[str, Any]:
    """The row of a trial in the results, after its run has ended."""
    row: dict[str, Any] = {
        "name": trial.name,
        "setting": trial.setting,
        "learning_rate": trial.learning_rate,
        "seed": trial.seed,
        "overrides": trial.overrides,
        "folder": f"runs/{trial.folder.name}",
        "measured": json.loads((trial.folder / MEASURED_FILE).read_text(encoding="utf-8")),
    }
    metrics = runs.finished(trial.folder)
    if metrics is not None:
        return row | {"status": "finished", "metrics": metrics}
    log = (trial.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(log) if line.strip()), f"exit code {code}")
    return row | {"status": "failed", "error": last.removeprefix("longseq: error: ")}


def config_folders() -> list[str]:
    """The flags that gave this command folders of configuration files."""
    flags = {"command-line": "--config-dir", "main": "--config-path"}
    sources = HydraConfig.get().runtime.config_sources
    given = [source for source in sources if source.provider in flags and source.schema == "file"]
    return [f"{flags[source.provider]}={source.path}" for source in given]
