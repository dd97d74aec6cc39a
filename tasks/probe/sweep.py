"""`longseq probe`: train mixers side by side on a probe, and compare them in a table and a plot."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from longseq.tasks.circumstances import find_circumstances
from longseq.tasks.probe import comparison
from longseq.tasks.report import print_rows, quiet_libraries, shorten
from longseq.tasks.training import runs
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.files import write_text

# Keys of this command; every other override goes to each `longseq train`.
OWN_KEYS = ("task", "mixers", "seeds", "sweep", "learning_rates", "jobs", "report", "plot", "output")
TAKEN_KEYS = {
    "mixer": "give mixers=[...]",
    "mixer.name": "give mixers=[...]",
    "seed": "give seeds=[...]",
    "resume": "the same command continues by itself",
}
# Keys that are lists, what they hold, and an example.
LISTS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("mixers", (str,), "[deltanet,mamba]"),
    ("seeds", (int,), "[0,1,2]"),
    ("learning_rates", (int, float), "[1e-3,3e-3]"),
)
# Text that means itself in an override.
PLAIN = re.compile(r"[\w/+.$%*@?|:-]+")
RUNS = "runs"
SAMPLES = "samples"  # what the runs share
RESULTS_FILE = "results.json"
LOG_FILE = "log.txt"
ERROR = "longseq: error: "  # how a run begins the line that tells its failure


class Trial(NamedTuple):
    """One run: the mixer as the user wrote it, the setting, learning rate and seed, and its folder and overrides."""

    mixer: str
    setting: dict[str, Any]
    learning_rate: float | None
    seed: int
    folder: Path
    overrides: list[str]

    def describe(self) -> str:
        """The trial in one line."""
        parts = [self.mixer, *(f"{key}={value}" for key, value in self.setting.items())]
        parts += [] if self.learning_rate is None else [f"learning rate {self.learning_rate:g}"]
        return f"{', '.join(parts)}, seed {self.seed}"


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train every mixer with every setting, learning rate and seed; write and return the results.

    The folder `cfg.output` receives results.json, table.md, plot.png and one run folder each below runs/. A run that is
    finished is not repeated, one that was interrupted continues.
    """
    quiet_libraries()
    config = resolve(cfg)
    _check(config)
    if config["plot"]:
        comparison.require_matplotlib()
    folder = Path(config["output"])
    given = [override for override in HydraConfig.get().overrides.task if _key(override) not in OWN_KEYS]
    trials = plan(config, given)
    done = sum(runs.finished(trial.folder) is not None for trial in trials)
    print(f"{len(trials)} runs, {done} of them finished before; writing to {shorten(folder)}", flush=True)
    results: dict[str, Any] = {
        "command": shlex.join(["longseq", "probe", *HydraConfig.get().overrides.task]),
        "report": config["report"],
        "selected_by": config["task"]["metric"],
        **_surroundings(config),
    }
    started = time.monotonic()
    rows: dict[int, dict[str, Any]] = {}
    for index, row in _run_all(trials, config):
        rows[index] = row
        results["rows"] = [rows[number] for number in sorted(rows)]
        results["seconds"] = round(time.monotonic() - started, 1)
        trained = [one["metrics"]["seconds"] for one in results["rows"] if one["status"] == "finished"]
        results["training_seconds"] = round(sum(trained), 1)  # of all runs, also of those finished before
        results["summary"] = comparison.summarize(results["rows"], config["report"], config["task"]["metric"])
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
        print(f"[{len(rows)}/{len(trials)}] {_line(trials[index], row, config['report'])}", flush=True)
    _conclude(results, config, folder)
    return results


def plan(config: Mapping[str, Any], given: Sequence[str]) -> list[Trial]:
    """Every trial of the sweep; the folder of each is named by all that its outcome depends on."""
    rates = config["learning_rates"] or [None]
    swept = config["sweep"] or {}
    settings = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    output, cached = Path(config["output"]).absolute(), any(_key(override) == "data.cache" for override in given)
    trials = []
    for mixer, setting, rate, seed in product(config["mixers"], settings, rates, config["seeds"]):
        name, *options = mixer.split()
        overrides = ["task=probe", *given, f"mixer={name}", *options, f"seed={seed}"]
        overrides += [f"{key}={_spell(value)}" for key, value in setting.items()]
        overrides += [] if rate is None else [f"recipe.learning_rate={rate}"]
        digest = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:10]
        folder = output / RUNS / f"{name}_{seed}_{digest}"
        if not cached:
            overrides.append(f"data.cache={_spell(str(output / SAMPLES))}")
        trials.append(Trial(mixer, setting, rate, seed, folder, overrides))
    folders = [trial.folder for trial in trials]
    if twice := [trial for trial in trials if folders.count(trial.folder) > 1]:
        raise ValueError(f"two runs are the same ({twice[0].describe()}): name each mixer, value, rate and seed once")
    return trials


def _check(config: Mapping[str, Any]) -> None:
    if config["task"]["name"] != "probe":
        raise ValueError(f"task={config['task']['name']} is no probe: longseq probe takes task=probe")
    for override in HydraConfig.get().overrides.task:
        if (remedy := TAKEN_KEYS.get(_key(override))) is not None:
            raise ValueError(f"longseq probe sets {_key(override)} itself: {remedy}")
    for key, kinds, example in LISTS:
        listed = config[key]
        if listed is None and key == "learning_rates":
            continue
        if not isinstance(listed, list) or not all(isinstance(value, kinds) for value in listed):
            raise ValueError(f"{key}={listed} must be a list, such as {key}={example}")
        if not listed or not all(str(value).strip() for value in listed):
            raise ValueError(f"{key} is empty: give at least one, such as {key}={example}")
    _check_swept(config["sweep"])
    if not isinstance(config["jobs"], int) or config["jobs"] < 1:
        raise ValueError(f"jobs={config['jobs']} must be at least 1, the number of runs at a time")
    if not isinstance(config["output"], str):
        raise ValueError(f"output={config['output']} must be a folder, such as outputs/probe/comparison")
    if config["trainer"].get("fast_dev_run"):
        raise ValueError("a trainer.fast_dev_run measures nothing to compare: try with recipe.epochs=1")
    if not str(config["report"]).startswith("test/"):
        raise ValueError(f"report={config['report']} must be a metric of the test, such as test/accuracy")


def _check_swept(sweep: Any) -> None:
    if sweep is None:
        return
    if not isinstance(sweep, dict):
        raise ValueError(f"sweep={sweep} has no keys: give lists by key, such as sweep={{model.d_model: [64, 128]}}")
    for key, values in sweep.items():
        if key in OWN_KEYS or key in TAKEN_KEYS:
            remedy = TAKEN_KEYS.get(key, f"give {key}=... beside it")
            raise ValueError(f"sweep: {key} is set by longseq probe itself: {remedy}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"sweep: {key} needs a list of values, such as sweep={{{key}: [64, 128]}}")


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _spell(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, in quotes where a character has a meaning there."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_spell(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_spell, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    escaped = value.replace("'", "\\'")
    return value if PLAIN.fullmatch(value) else f"'{escaped}'"


def _run_all(trials: Sequence[Trial], config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run the trials, `jobs` at a time, and yield each with its index as it ends."""
    jobs = config["jobs"]
    devices: queue.Queue[str | None] = queue.Queue()
    visible = _visible_devices(config)
    for slot in range(jobs):
        devices.put(visible[slot % len(visible)] if visible else None)
    processes: set[subprocess.Popen[bytes]] = set()
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def work(trial: Trial) -> dict[str, Any]:
        device = devices.get()
        try:
            return _run_one(trial, device, threads, processes)
        finally:
            devices.put(device)

    futures: dict[Future[dict[str, Any]], int] = {}
    with _stoppable(), ThreadPoolExecutor(jobs) as pool:
        try:
            for index, trial in enumerate(trials):
                futures[pool.submit(work, trial)] = index
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            told: set[subprocess.Popen[bytes]] = set()
            # Again until all have ended, for a run that was just being started.
            while not all(future.done() for future in futures):
                for process in processes - told:
                    process.terminate()
                    told.add(process)
                time.sleep(0.05)
            raise


@contextmanager
def _stoppable() -> Iterator[None]:
    """End this process in order where it is told to; its runs end with it, and each writes its checkpoint."""

    def leave(number: int, _: Any) -> None:
        print("stopping; the same command continues", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    # A shell that puts a command into the background has it ignore Ctrl-C.
    heeded = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_one(trial: Trial, device: str | None, threads: int, processes: set[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Train one trial, unless it is finished, and return its row."""
    log_path = trial.folder / LOG_FILE
    code = told_before = 0
    if runs.finished(trial.folder) is None:
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        trial.folder.mkdir(parents=True, exist_ok=True)
        told_before = log_path.stat().st_size if log_path.is_file() else 0
        command = [
            sys.executable,
            sys.argv[0],
            "train",
            *trial.overrides,
            "resume=true",
            f"hydra.run.dir={_spell(str(trial.folder))}",
        ]
        with log_path.open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            processes.add(process)
            code = process.wait()
            processes.discard(process)
    row: dict[str, Any] = {
        "mixer": trial.mixer,
        "setting": trial.setting,
        "learning_rate": trial.learning_rate,
        "seed": trial.seed,
        "overrides": trial.overrides,
    }
    metrics = runs.finished(trial.folder)
    if metrics is None:
        return row | {"status": "failed", "error": _last_error(log_path, told_before, code)}
    return row | {"status": "finished", "metrics": metrics}


def _last_error(log: Path, start: int, code: int) -> str:
    """What a run said last of its failure, in the log from `start` on: earlier attempts stand before it."""
    text = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if told := [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]:
        return told[-1]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}; the last line of {shorten(log)}: {lines[-1]}" if lines else ended


def _visible_devices(config: Mapping[str, Any]) -> list[str]:
    """The GPUs over which the runs are spread, as CUDA_VISIBLE_DEVICES names them; none for the CPU."""
    if config["trainer"].get("accelerator") == "cpu":
        return []
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


def _surroundings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The commit, the hardware and the versions that the runs use."""
    gpu = config["trainer"].get("accelerator") != "cpu" and torch.cuda.is_available()
    return {"measured": find_circumstances(torch.device("cuda" if gpu else "cpu")), "jobs": config["jobs"]}


def _line(trial: Trial, row: Mapping[str, Any], report: str) -> str:
    if row["status"] != "finished":
        return f"{trial.describe()}: failed ({row['error']})"
    metrics = row["metrics"]
    value = f"{report} {metrics[report]:.4f}" if report in metrics else f"no {report}"
    return f"{trial.describe()}: {value}, {metrics['seconds']:.0f} s"


def _conclude(results: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    """Write the table and the plot and say where; ValueError if a run failed."""
    report, written = config["report"], [RESULTS_FILE]
    if measured := {key for row in results["rows"] if row["status"] == "finished" for key in row["metrics"]}:
        if report not in measured:
            known = ", ".join(sorted(key for key in measured if key.startswith("test/")))
            raise ValueError(f"report={report} was not measured: choose one of {known}")
        write_text(folder / "table.md", comparison.markdown(results))
        written.append("table.md")
        print_rows(comparison.table(results))
        if config["plot"]:
            comparison.plot(results, folder / "plot.png")
            written.append("plot.png")
    print_rows([("written", ", ".join(shorten(folder / name) for name in written))])
    if failed := [row for row in results["rows"] if row["status"] != "finished"]:
        raise ValueError(
            f"{len(failed)} of {len(results['rows'])} runs failed, {failed[0]['mixer']} with seed {failed[0]['seed']} "
            f"first: {failed[0]['error']}; the same command tries them again"
        )
