"""`longseq compare`: train models of any task side by side, and compare them in a table and a plot.

Each run is a process of `longseq train`; a machine with several GPUs runs several at a time.
"""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from longseq.tasks import comparison
from longseq.tasks.circumstances import find_circumstances
from longseq.tasks.commands import Compare
from longseq.tasks.config import UNITS, read
from longseq.tasks.costs import match_parameters
from longseq.tasks.registry import read_experiment
from longseq.tasks.report import print_rows, quiet_libraries, shorten
from longseq.tasks.training import runs
from longseq.tasks.training.configuration import resolve, spell_value, with_absolute_root
from longseq.tasks.training.recipe import device_count
from longseq.tasks.training.schedule import WARMUPS
from longseq.tasks.training.system import write_text
from longseq.tasks.training.words import with_length

RESULTS_FILE, TABLE_FILE, PLOT_FILE = "results.json", "table.md", "plot.png"
CURVES_FILE = "curves.png"
LOG_FILE, MEASURED_FILE = "log.txt", "measured.json"  # of each run

# Keys of this command; every other override is passed to each `longseq train`.
OWN_KEYS = ("comparison", *Compare.model_fields)


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


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, Any]:
    """Train every row with every setting, learning rate and seed; write and return the results.

    `cfg.output` receives results.json, table.md, plot.png and the run folders. Interrupted runs continue.
    """
    # The words as typed: each run resolves `${key}` for itself.
    words: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    # Other keys may only resolve with the overrides of a row.
    own = {name: cfg[name] for name in Compare.model_fields}
    own = {name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for name, value in own.items()}
    keys = read(Compare, own)
    if keys.plot:
        import matplotlib  # noqa: F401  fail before the runs if it is missing
    folder = Path(keys.output)
    given = [word for word in words if _key(word).split(".")[0] not in OWN_KEYS]
    tries_rates = keys.rates_at < 1 and len(keys.learning_rates or ()) > 1
    trials = plan(keys, given, tries=tries_rates)
    first = trials[0].config
    metric = first["task"]["metric"]
    report = keys.report or metric.replace("val/", "test/")
    places = find_places(first)
    jobs = keys.jobs or max(1, len(places))
    config_name = HydraConfig.get().job.config_name
    name = [] if config_name in (None, "compare") else [f"--config-name={config_name}"]
    results: dict[str, Any] = {
        "command": shlex.join(["longseq", "compare", *config_folders(), *name, *words]),
        "report": report,
        "selected_by": metric,
        "measured": find_circumstances(device_of(places)),
        "jobs": jobs,
        "training_seconds": 0.0,
    }
    slots = [places[slot % len(places)] if places else None for slot in range(jobs)]
    if tries_rates:
        _train(trials, slots, results, "tries", folder)
        found = comparison.summarize(results["tries"], metric, metric)
        best = {_place(entry): entry["learning_rate"] for entry in found if entry["metrics"]}
        if not best:
            _refuse_failures(results["tries"])
        trials = plan(keys, given, rates=best)
    _train(trials, slots, results, "rows", folder)
    results["costs"] = comparison.find_costs(results, folder)
    write_text(folder / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
    write_text(folder / TABLE_FILE, comparison.markdown(results))
    print_rows(comparison.table(results))
    print_rows(comparison.cost_table(results))
    if keys.plot:
        comparison.plot(results, folder / PLOT_FILE)
        if any(entry["curves"] for entry in results["costs"]):
            comparison.plot_curves(results, folder / CURVES_FILE)
    _refuse_failures([*results.get("tries", ()), *results["rows"]])
    return results


def _refuse_failures(rows: Sequence[Mapping[str, Any]]) -> None:
    if failed := [row for row in rows if row["status"] == "failed"]:
        raise ValueError(f"{len(failed)} of {len(rows)} runs failed, first: {failed[0]['error']}")


def _train(
    trials: Sequence[Trial], slots: Sequence[str | None], results: dict[str, Any], key: str, folder: Path
) -> None:
    """Train the trials; after each, `results[key]` has the rows of those that have ended, and the file is written."""
    done = sum(runs.finished(trial.folder) is not None for trial in trials)
    print(f"{len(trials)} runs, {done} of them finished before; writing to {shorten(folder)}", flush=True)
    results["planned"] = len(trials)  # an interrupted comparison has fewer rows
    report, metric = results["report"], results["selected_by"]
    # Metrics chosen by name, such as f1_weighted, are no slices of the reported one (f1).
    named = {f"test/{name}" for trial in trials for name in trial.config["task"].get("metrics") or ()}
    rows: dict[int, dict[str, Any]] = {}
    with closing(run_all(trials, slots)) as ended:
        for index, row in ended:
            rows[index] = row
            results[key] = [rows[number] for number in sorted(rows)]
            finished = [one for name in ("tries", "rows") for one in results.get(name, ()) if "metrics" in one]
            results["training_seconds"] = round(sum(one["metrics"]["seconds"] for one in finished), 1)
            if key == "rows":
                results["summary"] = comparison.summarize(results["rows"], report, metric, named)
            write_text(folder / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
            value = f"{report} {row['metrics'].get(report)}" if "metrics" in row else f"failed ({row['error']})"
            print(f"[{len(rows)}/{len(trials)}] {trials[index].describe()}: {value}", flush=True)


def _place(entry: Mapping[str, Any]) -> str:
    """The row and the setting of a trial, as the key of its best learning rate."""
    return f"{entry['name']} {entry['setting']}"


def plan(
    keys: Compare, given: Sequence[str], *, tries: bool = False, rates: Mapping[str, float | None] | None = None
) -> list[Trial]:
    """All trials, each with a folder named by a hash of its configuration.

    A row replaces the overrides `given` of every run, and the sweep replaces both. `tries` are shorter runs, with the
    first seed, that try the learning rates; `rates` are the best of these, and rows without one are left out.
    """
    rows = {mixer: f"mixer={mixer}" for mixer in keys.mixers} | dict(keys.rows or {})
    swept = keys.sweep or {}
    settings = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    trials = []
    for (name, words), setting in product(rows.items(), settings):
        place = _place({"name": name, "setting": setting})
        tried: Sequence[float | None] = keys.learning_rates or [None]
        if rates is not None:
            tried = [rates[place]] if place in rates else []
        layers = (keys.overrides or [], given, shlex.split(words), _set(setting))
        overrides = _combine([word for layer in layers for word in with_length(layer)])
        composed = compose("train", overrides)
        if tries:
            overrides = _combine([*overrides, *_set(_shorten(composed, keys.rates_at))])
        if keys.parameters is not None:
            ratio = match_parameters(resolve(composed), keys.parameters)
            overrides = _combine([*overrides, *_set({"model.mlp_ratio": ratio})])
        for rate, seed in product(tried, keys.seeds[:1] if tries else keys.seeds):
            words_of_rate = [] if rate is None else _set({"recipe.learning_rate": rate})
            trials.append(_trial(keys, name, setting, rate, seed, _combine([*overrides, *words_of_rate])))
    if len({trial.folder for trial in trials}) < len(trials):
        raise ValueError("two runs of this comparison have the same configuration and seed")
    return trials


def _trial(
    keys: Compare, name: str, setting: dict[str, Any], rate: float | None, seed: int, overrides: list[str]
) -> Trial:
    output = Path(keys.output).absolute()
    composed = compose("train", overrides)
    OmegaConf.update(composed, "output", "")  # the folder does not depend on its own name
    OmegaConf.update(composed, "seed", seed)
    config = resolve(composed)
    if seed == keys.seeds[0]:
        read_experiment(config)
    content = json.dumps(with_absolute_root(config), sort_keys=True, default=str)
    label = "".join(letter if letter.isalnum() else "_" for letter in name.split()[0])
    folder = output / "runs" / f"{label}_{seed}_{hashlib.sha256(content.encode()).hexdigest()[:10]}"
    return Trial(name, setting, rate, seed, folder, _combine([*overrides, f"seed={seed}"]), config)


def _set(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={spell_value(value)}" for key, value in values.items()]


def _shorten(composed: DictConfig, part: float) -> dict[str, Any]:
    """The keys that shorten a run and its warm-up to a part of their lengths."""
    recipe = composed.recipe
    lengths = {f"recipe.{unit}": recipe.get(unit) for unit in UNITS}
    lengths |= {f"recipe.schedule.{name}": (recipe.get("schedule") or {}).get(name) for name in WARMUPS}
    whole = ("recipe.epochs", "recipe.updates", "recipe.schedule.warmup_updates")
    shorter = {key: value * part for key, value in lengths.items() if value}
    return {key: max(1, round(value)) if key in whole else value for key, value in shorter.items()}


def _combine(overrides: Sequence[str]) -> list[str]:
    """The overrides, where later ones replace earlier ones: Hydra takes one choice of a group and one `+key`."""
    kept: dict[Any, str] = {}
    for place, word in enumerate(overrides):
        key = _key(word)
        if "." not in key:
            kept[key] = word
        elif word.startswith("+") and any(_key(earlier) == key for earlier in overrides[:place]):
            kept[place] = f"++{word.lstrip('+')}"
        else:
            kept[place] = word
    return list(kept.values())


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


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
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
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


def _start(trial: Trial, place: str | None, *, jobs: int) -> subprocess.Popen[bytes]:
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    if place is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_text(trial.folder / MEASURED_FILE, json.dumps(find_circumstances(device_of(place))) + "\n")
    words = [*config_folders(), *trial.overrides, "resume=true", f"hydra.run.dir={spell_value(str(trial.folder))}"]
    command = [sys.executable, sys.argv[0], "train", *words]
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
