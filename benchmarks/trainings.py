"""Trainings of one table side by side, the same ones for every seed; a later call of the same command continues.

Words of every script that uses this page:
  output=FILE.json   the table, written again after every run; runs that it holds are not repeated
  seeds=0,1,2        rows=NAME,NAME (of the script's; no word: all)
  jobs=N             runs at a time, spread over the GPUs        threads=N  of torch in each run
  seconds=N          what is running then is told to stop, writes a checkpoint, and continues in a later call
  work=FOLDER        run folders and logs
Every other word is an override of each `longseq train`.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longseq.tasks.circumstances import find_circumstances, find_commit
from longseq.tasks.training import runs

HERE = Path(__file__).parent
ENTRY = HERE / "entry.py"
GRACE = 30.0  # seconds that a run has for its checkpoint
SAME = ("commit", "gpu", "versions")  # what all runs of a table must share


class Row(NamedTuple):
    """A row of the table: the overrides of its runs, and words for entry.py, where {seed} stands for the seed."""

    name: str
    words: tuple[str, ...]
    changes: tuple[str, ...] = ()
    fixed_seed: int | None = None  # the seed of every run, where what differs is in `changes`


class Options(NamedTuple):
    """The words of the command, and the overrides that are left."""

    output: Path
    seeds: list[int]
    rows: list[str]
    jobs: int
    threads: int
    seconds: float
    work: Path
    overrides: list[str]


def read_options(arguments: Sequence[str], name: str, rows: Iterable[str], seeds: int, jobs: int) -> Options:
    """Raises ValueError for a word that does not fit."""
    words = {
        "output": str(HERE / f"{name}.json"),
        "seeds": ",".join(map(str, range(seeds))),
        "rows": ",".join(rows),
        "jobs": str(jobs),
        "threads": "1",
        "seconds": "inf",
        "work": str(Path(tempfile.gettempdir()) / f"longseq_{name}"),
    }
    known, overrides = ",".join(rows).split(","), []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in words:
            words[key] = value
        else:
            overrides.append(argument)
    chosen = words["rows"].split(",")
    if unknown := [row for row in chosen if row not in known]:
        raise ValueError(f"rows={','.join(unknown)}: choose from {', '.join(known)}")
    return Options(
        Path(words["output"]),
        [int(seed) for seed in words["seeds"].split(",")],
        chosen,
        int(words["jobs"]),
        int(words["threads"]),
        float(words["seconds"]),
        Path(words["work"]),
        overrides,
    )


class Table:
    """The rows so far, written after every run."""

    def __init__(self, file: Path, head: Mapping[str, Any], device: torch.device) -> None:
        self.file, self.head, self.here = file, head, find_circumstances(device)
        self.rows: dict[str, dict[str, Any]] = {}
        if not file.is_file():
            return
        for row in json.loads(file.read_text())["rows"]:
            then = row["measured"]
            if differing := [key for key in SAME if then.get(key) != self.here.get(key)]:
                raise ValueError(f"output={file} has runs of another {', '.join(differing)}: name another file")
            if self.here["processor"] not in then["processor"]:
                then["processor"] += f" or {self.here['processor']}"
            self.rows[row["model"]] = row

    def has(self, name: str, seed: int) -> bool:
        return str(seed) in self.rows.get(name, {}).get("test_top1", {})

    def add(self, name: str, seed: int, metrics: Mapping[str, Any], options: Options) -> None:
        row = self.rows.setdefault(name, {"model": name, "parameters": metrics["parameters"]})
        row["epochs"] = metrics["epochs"]
        for key, metric, digits in (
            ("test_top1", "test/top1", 4),
            ("validation_top1", "val/top1", 4),
            ("seconds", "seconds", 0),
            ("images_per_second", "images_per_second", 0),
        ):
            if metric not in metrics:  # of a run that was too short for a speed
                continue
            cell = {**row.get(key, {}), str(seed): round(metrics[metric], digits or None)}
            row[key] = dict(sorted(cell.items(), key=lambda pair: int(pair[0])))
        row |= {"runs_at_a_time": options.jobs, "threads": options.threads, "measured": row.get("measured", self.here)}

    def write(self, order: Sequence[str]) -> None:
        held = sorted(self.rows.values(), key=lambda row: order.index(row["model"]))
        text = json.dumps({**self.head, "rows": held}, indent=2, ensure_ascii=False)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(self.file)


class Trainer:
    """Runs `longseq train` by entry.py, each on the next free place."""

    def __init__(self, options: Options, gpus: Sequence[str]) -> None:
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.places: queue.Queue[str] = queue.Queue()
        for number in range(options.jobs):
            self.places.put(gpus[number % len(gpus)] if gpus else "")

    def left(self) -> float:
        """Seconds until the runs are told to stop."""
        return self.end - time.monotonic()

    def stop(self, *_: Any) -> None:
        """Let every run write its checkpoint and end, and start no other."""
        self.end = time.monotonic()
        for process in tuple(self.processes):
            process.terminate()

    def train(self, row: Row, seed: int) -> Mapping[str, Any] | None:
        """The metrics of a run; None if it did not end in time. RuntimeError, with the end of its log, if it failed."""
        place = self.places.get()
        try:
            return self._train(row, seed, place)
        finally:
            self.places.put(place)

    def _train(self, row: Row, seed: int, place: str) -> Mapping[str, Any] | None:
        # Named by all that the outcome depends on: a run of another commit or recipe is not this one.
        digest = find_digest(row.words, row.changes, row.fixed_seed, self.options.overrides, find_commit())
        folder = self.options.work / f"{row.name.replace(' ', '_')}_{seed}_{digest}"
        if (metrics := runs.finished(folder)) is not None:
            return metrics
        if self.left() < GRACE:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, ENTRY, *(change.format(seed=seed) for change in row.changes), "--", *row.words]
        command += [f"seed={seed if row.fixed_seed is None else row.fixed_seed}", *self.options.overrides]
        command += ["resume=true", f"hydra.run.dir={folder}"]
        threads = str(self.options.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": place,
        }
        with open(folder / "log.txt", "ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            self.processes.add(process)
            try:
                process.wait(None if self.left() == float("inf") else max(self.left(), 0.0))
            except subprocess.TimeoutExpired:
                process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.processes.discard(process)
        metrics = runs.finished(folder)
        if metrics is None and self.left() > 0:
            told = (folder / "log.txt").read_text(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(
                f"{row.name}, seed {seed}, ended with exit code {process.returncode}: {' | '.join(told)}"
            )
        return metrics


def find_digest(*parts: Any) -> str:
    """A short name for what these values are."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


def run_table(rows: Sequence[Row], head: Mapping[str, Any], options: Options, gpus: Sequence[str]) -> int:
    """Train every row with every seed, all rows with the first seed first; the exit code.

    The runs share the `gpus`; without any they see the processor alone.
    """
    table = Table(options.output, head, torch.device("cuda" if gpus else "cpu"))
    order = [row.name for row in rows]
    work = [(row, seed) for seed in options.seeds for row in rows if row.name in options.rows]
    todo = [(row, seed) for row, seed in work if not table.has(row.name, seed)]
    print(f"{len(work)} runs, {len(work) - len(todo)} of them in {options.output}; folders: {options.work}", flush=True)
    trainer, writing, failures = Trainer(options, gpus), threading.Lock(), []
    signal.signal(signal.SIGTERM, trainer.stop)

    def work_on(item: tuple[Row, int]) -> bool:
        row, seed = item
        try:
            metrics = trainer.train(row, seed)
        except RuntimeError as error:
            failures.append(str(error))
            print(error, flush=True)
            return False
        if metrics is None:
            return False
        with writing:
            table.add(row.name, seed, metrics, options)
            table.write(order)
        print(f"{row.name}, seed {seed}: {metrics['test/top1']:.4f}, {metrics['seconds']:.0f} s", flush=True)
        return True

    with ThreadPoolExecutor(options.jobs) as pool:
        done = sum(pool.map(work_on, todo))
    if left := len(todo) - done - len(failures):
        print(f"{left} runs are left: the same command continues", flush=True)
    return 1 if failures else 0
