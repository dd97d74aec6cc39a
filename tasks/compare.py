"""`longseq compare`: train models of any task side by side, and compare them in a table and a plot."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from longseq.files import Kind, check_replaced, json_keys
from longseq.tasks import comparison, comparison_runs, registry
from longseq.tasks.circumstances import find_circumstances, find_commit
from longseq.tasks.experiment import read_experiment
from longseq.tasks.report import print_rows, quiet_libraries, shorten
from longseq.tasks.train import check_init
from longseq.tasks.training import processes, runs
from longseq.tasks.training.configuration import resolve, spell_value
from longseq.tasks.training.files import write_text
from longseq.tasks.training.options import Length, Range, read
from longseq.tasks.training.recipe import device_count
from longseq.tasks.training.signals import answered
from longseq.tasks.training.trainer import refuse_absent_devices

# Keys of `longseq train` that this command sets itself.
TAKEN_KEYS = {
    "mixer": "give mixers=[...]",
    "mixer.name": "give mixers=[...]",
    "seed": "give seeds=[...]",
    "resume": "the same command continues by itself",
}
RUNS = "runs"
SAMPLES = "samples"  # the folder of samples that the runs share
RESULTS_FILE, TABLE_FILE, PLOT_FILE = "results.json", "table.md", "plot.png"
LOG_FILE = "log.txt"
_RESULTS = Kind("results of `longseq compare`", lambda path: {"command", "selected_by", "rows"} <= json_keys(path))
ERROR = "longseq: error: "  # how a run begins its error message


@dataclass(frozen=True, kw_only=True)
class CompareKeys:
    """The keys of `longseq compare` beside those of `longseq train`; conf/compare.yaml documents them."""

    mixers: list[str]
    rows: Mapping[str, str] | None
    overrides: list[str] | None
    seeds: Annotated[list[int], Range(0, 2**32 - 1), Length(1)]
    sweep: Mapping[str, Annotated[list[Any], Length(1)]] | None
    learning_rates: Annotated[list[float], Range(0), Length(1)] | None
    jobs: Annotated[int, Range(1)] | None
    report: str | None
    plot: bool
    output: str

    def __post_init__(self) -> None:
        for key in ("mixers", "seeds", "learning_rates"):
            listed = getattr(self, key) or []
            if not all(str(value).strip() for value in listed):
                raise ValueError(f"{key}={listed} has an entry without a word: leave it out")
            if repeated := [value for value in listed if listed.count(value) > 1]:
                raise ValueError(f"{key} names {repeated[0]} more than once: name each once")
        if not self.mixers and not self.rows:
            raise ValueError("mixers is empty: give at least one, such as mixers=[deltanet,mamba]")
        for key in self.sweep or {}:
            if key in OWN_KEYS or key in TAKEN_KEYS:
                remedy = TAKEN_KEYS.get(key, f"give {key}=... beside it")
                raise ValueError(f"sweep: {key} is set by longseq compare itself: {remedy}")
        if self.report is not None and not self.report.startswith("test/"):
            raise ValueError(f"report={self.report} must be a metric of the test, such as test/accuracy")


# Keys of this command; every other override is passed to each `longseq train`.
OWN_KEYS = ("comparison", *(entry.name for entry in fields(CompareKeys)))


class Trial(NamedTuple):
    """One run: the name of its row, its setting, learning rate and seed, and its folder and overrides."""

    name: str
    setting: dict[str, Any]
    learning_rate: float | None
    seed: int
    folder: Path
    overrides: list[str]

    def describe(self) -> str:
        """The trial in one line."""
        parts = [self.name, *(f"{key}={value}" for key, value in self.setting.items())]
        parts += [] if self.learning_rate is None else [f"learning rate {self.learning_rate:g}"]
        return f"{', '.join(parts)}, seed {self.seed}"


@quiet_libraries()
def run(cfg: DictConfig) -> dict[str, Any]:
    """Train every row with every setting, learning rate and seed; write and return the results.

    The folder `cfg.output` receives results.json, table.md, plot.png and one run folder each below runs/. A finished
    run is not repeated, an interrupted one continues.
    """
    # As they were given: `${key}` means the key of each run, and not that of this command.
    words: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    _check_overrides(words)
    own = _own_keys(cfg)
    if own.plot:
        comparison.require_matplotlib()
    if not own.output:
        raise ValueError("output is empty: give output=FOLDER, or leave it out")
    folder = Path(own.output)
    _check_folder(folder)
    trials = plan(own, [override for override in words if _key(override).split(".")[0] not in OWN_KEYS])
    firsts = trials[:: len(own.seeds)]
    files = [compose("train", trial.overrides) for trial in firsts]
    composed = [resolve(config) for config in files]
    trained = composed[0]
    metric, report = trained["task"]["metric"], own.report or trained["task"]["metric"].replace("val/", "test/")
    # Metrics of the task that the user names are no slices of the one that is reported.
    others = {f"test/{name}" for config in composed for name in config["task"].get("metrics") or ()}
    places = _places(trained)
    earlier = [comparison_runs.finished(trial.folder) for trial in trials]
    waiting = [trial for trial, metrics in zip(trials, earlier, strict=True) if metrics is None]
    read_again = {trial._replace(seed=own.seeds[0]).describe() for trial in waiting}
    for trial, config in zip(firsts, composed, strict=True):
        read_experiment(config)  # a mistake is told before any run begins
        if trial.describe() in read_again:  # the files of finished runs may be gone, and so may their devices
            if not places:  # else these are the devices
                refuse_absent_devices(config["trainer"])
            registry.of(config).data.require_files(config)
            if not trial.folder.exists():  # a run that has begun goes on from its own checkpoint
                check_init(config)
    planned = [_with_seed(files[index // len(own.seeds)], trial) for index, trial in enumerate(trials)]
    known = _check_earlier(trials, planned)
    if not waiting:  # a mistake is told before earlier results are replaced
        _check_report(report, [metrics for metrics in earlier if metrics is not None])
    # Runs of one task and of the same data measure the same metrics, so that one of them tells of a mistake.
    alike = all((config["task"], config["data"]) == (trained["task"], trained["data"]) for config in composed)
    jobs = own.jobs or max(1, len(places))
    print(
        f"{len(trials)} runs, {len(trials) - len(waiting)} of them finished before; writing to {shorten(folder)}",
        flush=True,
    )
    results: dict[str, Any] = {
        "command": shlex.join(["longseq", "compare", *_config_flags(), *words]),
        "report": report,
        "selected_by": metric,
        "measured": find_circumstances(_device(places[0] if places else None)),
        "jobs": jobs,
        "planned": len(trials),  # an interrupted comparison has fewer rows
    }
    tokenizers = list(dict.fromkeys(str(config["data"].get("tokenizer") or "null") for config in composed))
    if len(tokenizers) > 1:
        results["tokenizers"] = tokenizers
    _tell_other_data(results, known)
    started = time.monotonic()
    rows: dict[int, dict[str, Any]] = {}
    for index, row in _run_all(trials, jobs, places):
        if alike and trials[index] in waiting and row["status"] == "finished":
            _check_report(report, [row["metrics"]])
        rows[index] = row
        results["rows"] = [rows[number] for number in sorted(rows)]
        results["seconds"] = round(time.monotonic() - started, 1)
        seconds = [one["metrics"]["seconds"] for one in results["rows"] if one["status"] == "finished"]
        results["training_seconds"] = round(sum(seconds), 1)  # of all runs, including those that had finished before
        results["summary"] = comparison.summarize(results["rows"], report, metric, others)
        folder.mkdir(parents=True, exist_ok=True)
        if trials[index] in waiting:
            known += comparison_runs.find_trained(trials[index].folder, planned[index])
            _tell_other_data(results, known)
        write_text(folder / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
        for name in (TABLE_FILE, PLOT_FILE) if len(rows) == 1 else ():
            (folder / name).unlink(missing_ok=True)  # of earlier results, also if this comparison is interrupted
        print(f"[{len(rows)}/{len(trials)}] {_line(trials[index], row, report)}", flush=True)
    _conclude(results, own.plot, folder)
    return results


def _check_folder(folder: Path) -> None:
    """Raise ValueError, in one line, where a comparison would replace a file of another program."""
    results = folder / RESULTS_FILE
    check_replaced(results, "output", _RESULTS)
    others = (folder / name for name in (TABLE_FILE, PLOT_FILE))
    if not results.is_file() and (other := next(filter(os.path.lexists, others), None)):
        raise ValueError(
            f"output={folder}: {other} is there without {results}, and would be replaced: name another folder"
        )


def plan(own: CompareKeys, given: Sequence[str]) -> list[Trial]:
    """All trials. The folder of each is named by everything that its outcome depends on.

    `own` are the keys of this command, `given` the overrides of every run. If a key is given several times, the last
    value counts: the overrides of a row replace those of every run, and those of the sweep replace both. Dictionaries
    are merged, and what is added after a deletion does not bring the deleted values back, as in `longseq train`.
    """
    rates: Sequence[float | None] = own.learning_rates or [None]
    swept = own.sweep or {}
    settings = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    output = Path(own.output).absolute()
    rows = {mixer: [f"mixer={mixer.split()[0]}", *mixer.split()[1:]] for mixer in own.mixers}
    rows |= {name: shlex.split(words) for name, words in (own.rows or {}).items()}
    trials = []
    for (name, words), setting, rate, seed in product(rows.items(), settings, rates, own.seeds):
        overrides = [*(own.overrides or []), *given, *words, f"seed={seed}"]
        overrides += [f"{key}={spell_value(value)}" for key, value in setting.items()]
        overrides += [] if rate is None else [f"recipe.learning_rate={rate}"]
        overrides = _leave_out_replaced(overrides)
        begin = f"{re.sub('[^A-Za-z0-9_]+', '_', name.split()[0])}_{seed}"
        place, earlier = (
            output / RUNS / f"{begin}_{hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:10]}"
            for listed in (_in_one_order(overrides), overrides)
        )
        if earlier.exists() and not place.exists():
            place = earlier  # of a version whose names kept the order of the words
        if _makes_samples(overrides):
            overrides.append(f"data.cache={spell_value(str(output / SAMPLES))}")
        trials.append(Trial(name, setting, rate, seed, place, overrides))
    folders = [trial.folder for trial in trials]
    if same := [trial for trial in trials if folders.count(trial.folder) > 1]:
        raise ValueError(f"two runs are the same ({same[0].describe()}): name each row, value, rate and seed once")
    return trials


def _makes_samples(overrides: Sequence[str]) -> bool:
    """True if the data is generated, so that all runs share it, and no folder was given for it."""
    groups = tuple(word for word in overrides if _key(word) in ("task", "data", "experiment"))
    return all(_key(word) != "data.cache" for word in overrides) and _are_drawn(groups)


@lru_cache
def _are_drawn(groups: tuple[str, ...]) -> bool:
    return "draw_seed" in compose("train", list(groups)).data


def _leave_out_replaced(overrides: Sequence[str]) -> list[str]:
    """The overrides without those that a later one of the same key replaces."""
    kept: list[str] = []
    for index, override in reversed(list(enumerate(overrides))):
        later = next((one for one in kept if _key(one) == _key(override)), None)
        if later is not None and _is_addition(override) and not later.startswith("+"):
            needed = not _composes((*overrides[:index], *kept)) or _needs(later, override)
        else:
            needed = later is None or _needs(later, override)
        if needed:
            kept.insert(0, override)
    return kept


@lru_cache
def _composes(overrides: tuple[str, ...]) -> bool:
    """True if each of the overrides has a key to change or to delete."""
    try:
        compose("train", list(overrides))
    except HydraException:
        return False
    return True


def _in_one_order(overrides: Sequence[str]) -> list[str]:
    """The overrides in an order that does not depend on theirs, where each is of a place of its own.

    Words that add or delete keys, and dictionaries, stay in their order: so do the keys of the configuration.
    """
    for pair in combinations(overrides, 2):
        short, long = sorted(pair, key=lambda word: len(_key(word)))
        is_group = "." not in _key(short) and _sets_a_value(short)  # its file is read before keys are set
        if _key(long) == _key(short) or (_key(long).startswith(f"{_key(short)}.") and not is_group):
            return list(overrides)
    return [word for word in overrides if not _sets_a_value(word)] + sorted(filter(_sets_a_value, overrides))


def _sets_a_value(override: str) -> bool:
    return override[0] not in "+~" and not _after_equals(override).startswith("{")


def _needs(later: str, earlier: str) -> bool:
    """True if the later one of two overrides of a key has another effect without the earlier one."""
    value, before = _dictionary(later), _dictionary(earlier)
    if before is not None and value is None and "." not in _key(later):
        return True  # the file of a group is read before keys are set, wherever it stands
    if later.startswith("~"):
        return False
    if value is None or before is None:
        brings_back = _is_addition(later) and not _after_equals(later).startswith("[")
        return value is not None or (earlier.startswith("~") and brings_back)
    return OmegaConf.to_container(OmegaConf.merge(before, value)) != value


def _is_addition(override: str) -> bool:
    return override.startswith("+") and not override.startswith("++")


def _dictionary(override: str) -> dict[Any, Any] | None:
    """The value of an override that is a dictionary, else None."""
    if not _after_equals(override).startswith("{"):
        return None
    value: Any = OverridesParser.create().parse_override(override).value()
    return value if isinstance(value, dict) else None


def _after_equals(override: str) -> str:
    return override.partition("=")[2].lstrip()


def _own_keys(cfg: DictConfig) -> CompareKeys:
    # One by one: interpolations that the rows' own overrides complete may not resolve yet.
    values = {entry.name: cfg[entry.name] for entry in fields(CompareKeys)}
    return read(
        CompareKeys,
        {key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in values.items()},
    )


def _with_seed(composed: DictConfig, trial: Trial) -> dict[str, Any]:
    """The configuration of a trial, from that of its row with another seed."""
    config = copy.deepcopy(composed)
    OmegaConf.update(config, "seed", trial.seed)
    OmegaConf.update(config, "output", str(trial.folder))
    return resolve(config)


def _check_earlier(trials: Sequence[Trial], planned: Sequence[Mapping[str, Any]]) -> list[comparison_runs.Trained]:
    """What the runs that have begun know of their data. ValueError if one of them is not the run that is planned."""
    begun = [
        (trial.folder, config)
        for trial, config in zip(trials, planned, strict=True)
        if trial.folder.exists() and not comparison_runs.is_untrained(trial.folder)
    ]
    comparison_runs.refuse_others(begun, find_commit())
    return [known for folder, config in begun for known in comparison_runs.find_trained(folder, config)]


def _tell_other_data(results: dict[str, Any], known: Sequence[comparison_runs.Trained]) -> None:
    """Warn once if the runs were not trained on the same data, and note it in the results."""
    if "other_data" not in results and (told := comparison_runs.find_other_data(known)) is not None:
        results["other_data"] = told
        print(f"longseq: warning: {told}", file=sys.stderr, flush=True)


def _check_overrides(words: Sequence[str]) -> None:
    for word in words:
        if (remedy := TAKEN_KEYS.get(_key(word))) is not None:
            raise ValueError(f"longseq compare sets {_key(word)} itself: {remedy}")
        if re.fullmatch(r"\+*trainer\.fast_dev_run=[^0fF].*", word):
            raise ValueError("a trainer.fast_dev_run measures nothing to compare: try with recipe.epochs=1")


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _run_all(trials: Sequence[Trial], jobs: int, places: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run the trials, `jobs` at a time, distributed over `places`; yield each with its index when it ends."""
    devices: queue.Queue[str | None] = queue.Queue()
    for slot in range(jobs):
        devices.put(places[slot % len(places)] if places else None)
    started: set[subprocess.Popen[bytes]] = set()
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def work(trial: Trial) -> dict[str, Any]:
        device = devices.get()
        try:
            return _run_one(trial, device, threads, started)
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
            # Repeated until all have ended, for a run that was just being started.
            while not all(future.done() for future in futures):
                for process in started - told:
                    process.terminate()
                    told.add(process)
                time.sleep(0.05)
            raise


@contextmanager
def _stoppable() -> Iterator[None]:
    """End this process in order when it is told to; its runs end with it, and each writes its checkpoint."""

    def leave(number: int, _: Any) -> None:
        print("stopping; the same command continues", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    # A shell makes a background command ignore Ctrl-C.
    heeded = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    with answered(heeded, leave):
        yield


def _run_one(trial: Trial, device: str | None, threads: int, started: set[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Train one trial, unless it is finished, and return its row."""
    log_path = trial.folder / LOG_FILE
    code = told_before = 0
    if comparison_runs.finished(trial.folder) is None:
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **processes.followed_by_child()}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        trial.folder.mkdir(parents=True, exist_ok=True)
        if comparison_runs.is_untrained(trial.folder):  # `longseq train` would take it for finished
            (trial.folder / runs.METRICS_FILE).unlink()
            shutil.rmtree(trial.folder / "checkpoints", ignore_errors=True)
        comparison_runs.record_measured(trial.folder, _device(device))
        told_before = log_path.stat().st_size if log_path.is_file() else 0
        command = [
            sys.executable,
            sys.argv[0],
            "train",
            *_config_folders(),
            *trial.overrides,
            "resume=true",
            f"hydra.run.dir={spell_value(str(trial.folder))}",
        ]
        with log_path.open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            started.add(process)
            code = process.wait()
            started.discard(process)
    row: dict[str, Any] = {
        "name": trial.name,
        "setting": trial.setting,
        "learning_rate": trial.learning_rate,
        "seed": trial.seed,
        "overrides": trial.overrides,
        "folder": f"{RUNS}/{trial.folder.name}",
    }
    metrics = comparison_runs.finished(trial.folder)
    if (measured := comparison_runs.read_measured(trial.folder)) is not None:
        row["measured"] = measured
    if comparison_runs.is_untrained(trial.folder):
        told = f"the run ended after 0 updates, so that nothing was trained; see {shorten(log_path)}"
        return row | {"status": "failed", "error": told}
    if metrics is None:
        return row | {"status": "failed", "error": _last_error(log_path, told_before, code)}
    return row | {"status": "finished", "metrics": metrics}


def _device(place: str | None) -> torch.device:
    return torch.device("cuda" if place is not None and torch.cuda.is_available() else "cpu")


def _config_folders() -> list[str]:
    """The arguments that gave this command folders of configuration beside ours or in place of ours."""
    flags = {"command-line": "--config-dir", "main": "--config-path"}
    sources = HydraConfig.get().runtime.config_sources
    given = [source for source in sources if source.provider in flags and source.schema == "file"]
    return [f"{flags[source.provider]}={source.path}" for source in given]


def _config_flags() -> list[str]:
    """The flags of this command that chose its files of configuration."""
    name = HydraConfig.get().job.config_name
    return [*_config_folders(), *([] if name in (None, "compare") else [f"--config-name={name}"])]


def _last_error(log: Path, start: int, code: int) -> str:
    """The last error message of a run in the log from `start` on, after those of earlier attempts."""
    text = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if told := [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]:
        return told[-1]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}; the last line of {shorten(log)}: {lines[-1]}" if lines else ended


def _places(trained: Mapping[str, Any]) -> list[str]:
    """For each place where a run fits, its GPUs as CUDA_VISIBLE_DEVICES names them; none for the CPU.

    A run on two devices takes two of them.
    """
    if trained["trainer"].get("accelerator") == "cpu":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    size = device_count(trained)
    if visible and size > len(visible):
        raise ValueError(f"trainer.devices: a run takes {size} GPUs, and there are {len(visible)}")
    return [",".join(visible[first : first + size]) for first in range(0, len(visible) - size + 1, size)]


def _line(trial: Trial, row: Mapping[str, Any], report: str) -> str:
    if row["status"] != "finished":
        return f"{trial.describe()}: failed ({row['error']})"
    metrics = row["metrics"]
    value = f"{report} {metrics[report]:.4f}" if comparison.is_number(metrics.get(report)) else f"no {report}"
    return f"{trial.describe()}: {value}, {metrics['seconds']:.0f} s"


def _check_report(report: str, found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are any metrics; ValueError if `report` is not among them."""
    measured = {key for metrics in found for key, value in metrics.items() if comparison.is_number(value)}
    if measured and report not in measured:
        known = ", ".join(sorted(key for key in measured if key.startswith("test/")))
        raise ValueError(f"report={report} was not measured: choose one of {known}")
    return bool(measured)


def _conclude(results: Mapping[str, Any], plotted: bool, folder: Path) -> None:
    """Write the table and the plot, and print where; ValueError if a run failed."""
    report, written = results["report"], [RESULTS_FILE]
    finished = [row for row in results["rows"] if row["status"] == "finished"]
    rates, metric = {row["learning_rate"] for row in finished}, results["selected_by"]
    if len(rates) > 1 and comparison.find_direction([row["metrics"] for row in finished], metric) is None:
        raise ValueError(f"{metric} does not say which values are better: give one of learning_rates={sorted(rates)}")
    if _check_report(report, [row["metrics"] for row in finished]):
        write_text(folder / TABLE_FILE, comparison.markdown(results))
        written.append(TABLE_FILE)
        print_rows(comparison.table(results))
        if plotted:
            comparison.plot(results, folder / PLOT_FILE)
            written.append(PLOT_FILE)
    commits = {row["measured"]["commit"] for row in results["rows"] if "metrics" in row and "measured" in row}
    if len(commits) > 1:
        told = ", ".join(sorted(str(commit).split()[0] for commit in commits))
        print(f"the runs are of several commits ({told}): another output=FOLDER trains all of them anew")
    print_rows([("written", ", ".join(shorten(folder / name) for name in written))])
    if failed := [row for row in results["rows"] if row["status"] != "finished"]:
        raise ValueError(
            f"{len(failed)} of {len(results['rows'])} runs failed, {failed[0]['name']} with seed {failed[0]['seed']} "
            f"first: {failed[0]['error']}; the same command tries them again"
        )
