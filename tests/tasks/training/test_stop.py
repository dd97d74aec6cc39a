"""How runs of several processes end: by SIGTERM, to one process or the whole group, or by the death of the first."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from forked import start_fork
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train
from longseq.tasks.image.module import ImageClassifier

LONG = ("recipe.epochs=200", "callbacks.checkpoint.every_n_train_steps=5")


def launch(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`longseq train` in a group of its own."""
    return start_fork(["train", *arguments], folder, start_new_session=True)


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> Path:
    end = time.monotonic() + 200
    while not (found := list(folder.glob("outputs/image/*/checkpoints/last.ckpt"))):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)
    return found[0]


def family(process: subprocess.Popen[str]) -> set[int]:
    """The processes of a session that have not ended."""
    alive = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == process.pid and fields[0] != "Z":
            alive.add(int(stat.parent.name))
    return alive


def ended_within(seconds: float, process: subprocess.Popen[str]) -> bool:
    end = time.monotonic() + seconds
    while family(process) and time.monotonic() < end:
        time.sleep(0.1)
    return not family(process)


@pytest.fixture(autouse=True)
def heeded_signals():
    """Ctrl-C and a closed terminal reach the runs also where the tests run in the background, which ignores both."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def leave_nothing():
    """Ends the processes that a failed test has left."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        for left in family(process):
            os.kill(left, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "whole_group", "options"),
    [
        (signal.SIGTERM, 143, False, ("trainer=ddp_sim",)),
        (signal.SIGTERM, 143, True, ("data.num_workers=2",)),
        pytest.param(signal.SIGTERM, 143, True, ("trainer=ddp_sim", "data.num_workers=1"), marks=pytest.mark.soak),
        (signal.SIGINT, 130, False, ()),
    ],
    ids=["first-of-two", "group-with-workers", "group-of-two-with-workers", "ctrl-c"],
)
def test_a_signal_saves_prints_one_line_and_leaves_with_its_code(
    number, code, whole_group, options, tmp_path, tiny_overrides, leave_nothing
):
    process = launch(tmp_path, *tiny_overrides, *LONG, *options)
    leave_nothing.append(process)
    last = wait_for_checkpoint(tmp_path, process)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    told = [line for line in errors.splitlines() if line.strip() and not line.startswith("epoch ")]
    assert len(told) == 1, errors
    saved = torch.load(last, weights_only=True)["global_step"]
    assert f"saved as of update {saved}:" in told[0]
    assert "resume=true" in told[0]
    assert ended_within(10, process)
    assert not (last.parent.parent / "run.lock").exists()


@pytest.mark.slow
def test_the_others_end_within_seconds_when_the_first_process_is_killed(
    tmp_path, tiny_overrides, leave_nothing, command_here
):
    # A run of hours: the others end because of the death, also where a busy machine lets them take a minute.
    endless = (*LONG, "recipe.epochs=200000", "trainer=ddp_sim", "data.num_workers=1")
    process = launch(tmp_path, *tiny_overrides, *endless)
    leave_nothing.append(process)
    run = wait_for_checkpoint(tmp_path, process).parents[1]
    second = command_here(tmp_path, "train", *tiny_overrides, f"hydra.run.dir={run}")
    assert second.returncode == 2
    assert "another process is writing to" in second.stderr
    assert second.stderr.count("\n") == 1
    assert len(family(process)) >= 4
    process.send_signal(signal.SIGKILL)
    assert ended_within(60, process), family(process)
    with FileLock(run / "run.lock", timeout=0):
        pass  # no process holds it


@pytest.mark.slow
def test_slurms_signal_before_the_end_of_a_job_stops_all_its_processes(tmp_path, tiny_overrides, leave_nothing):
    job = {"SLURM_JOB_NAME": "job", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NODELIST": "localhost"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    words = ("train", *tiny_overrides, *LONG, "trainer=ddp_sim", "hydra.run.dir=outputs/image/run")
    for rank in ("0", "1"):
        place = {**os.environ, **job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        leave_nothing.append(start_fork(words, tmp_path, environment=place, start_new_session=True))
    last = wait_for_checkpoint(tmp_path, leave_nothing[0])
    for process in leave_nothing:
        process.send_signal(signal.SIGUSR1)
    told = [process.communicate(timeout=60)[1] for process in leave_nothing]
    assert [process.returncode for process in leave_nothing] == [143, 143], told
    saved = torch.load(last, weights_only=True)["global_step"]
    assert f"saved as of update {saved}: " in told[0]
    assert not list(tmp_path.glob("**/hpc_ckpt*"))


# An epoch has six updates.
EPOCHS = ("recipe.epochs=3", "recipe.validate_every_epochs=2", "+trainer.limit_train_batches=6")
UPDATES = ("recipe.epochs=null", "recipe.updates=11", "recipe.validate_every_updates=4")
UPDATES += ("trainer.accumulate_grad_batches=2", "+trainer.limit_train_batches=16")
WRITTEN = ("logger=[tensorboard,csv]", "trainer.log_every_n_steps=1", "recipe.ema.warmup=true")


def result(folder: Path) -> Any:
    """What a run has trained, measured and logged, without times."""
    saved = [torch.load(folder / "checkpoints" / name, weights_only=True) for name in ("last.ckpt", "best.ckpt")]
    states = [{name: one[name] for name in ("state_dict", "optimizer_states", "global_step", "epoch")} for one in saved]
    metrics = json.loads((folder / "metrics.json").read_text())
    with (folder / "metrics.csv").open() as file:
        rows = [{name: row[name] for name in row if not name.startswith("throughput/")} for row in csv.DictReader(file)]
    for path in folder.glob("events.out.*"):  # files of one second are read by their last number, .10 before .9
        stem, _, number = path.name.rpartition(".")
        path.rename(path.with_name(f"{stem}.{int(number):04}"))
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith("throughput/")]
    curves = {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}
    measured = {name: value for name, value in metrics.items() if name.startswith(("val/", "test/", "epochs"))}
    rows = [row for row in rows if len(set(row.values())) > 2]
    loops = [saved[0]["loops"]["fit_loop"][key] for key in ("epoch_progress", "epoch_loop.state_dict")]
    return as_lists([*states, loops, measured, rows, curves])


def as_lists(value: Any) -> Any:
    """The value with its tensors as lists, which can be compared."""
    if isinstance(value, dict):
        return {name: as_lists(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_lists(part) for part in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compose_config, tiny_overrides):
    """What the uninterrupted run of these words gives."""
    known: dict[tuple[str, ...], Any] = {}

    def find(words: tuple[str, ...]) -> Any:
        if words not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            train.run(compose_config("train", *tiny_overrides, *WRITTEN, *words, f"output={folder}"))
            known[words] = result(folder)
        return known[words]

    return find


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "update", "within"),
    [(EPOCHS, 18, "validation"), (UPDATES, 8, "validation"), (UPDATES, 11, "update")],
    ids=["the last epoch", "the updates of an epoch", "a run within an epoch"],
)
def test_a_stop_at_a_validation_saves_the_update_and_resumes_with_the_validation(
    words, update, within, whole, tiny, tmp_path, capsys
):
    method, before = ("training_step", 1) if within == "update" else ("validation_step", 0)
    step = getattr(ImageClassifier, method)

    def stop(self: ImageClassifier, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == update - before:
            if within == "validation":
                raise OSError("unplugged")
            if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:  # the last batch of the update
                signal.raise_signal(signal.SIGTERM)
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, method, stop)
        with pytest.raises((SystemExit, OSError)) as left:
            train.run(tiny(*WRITTEN, *words))
    assert getattr(left.value, "code", 143) == 143
    assert f"stopped; saved as of update {update}: " in capsys.readouterr().err
    validated: list[int] = []
    start = ImageClassifier.on_validation_epoch_start

    def note(self: ImageClassifier) -> None:
        validated.append(self.global_step)
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, "on_validation_epoch_start", note)
        train.run(tiny(*WRITTEN, *words, "resume=true"))
    due = (12, 18) if words is EPOCHS else (4, 8, 11)
    assert validated == [number for number in due if number >= update]
    assert result(tmp_path / "run") == whole(words)


@contextmanager
def stopping(method: str, update: int, error: Exception | None = None):
    """In the block a run is stopped where the model's `method` ends after `update`: by SIGTERM, or by an error."""
    before = getattr(ImageClassifier, method)

    def stop(self: ImageClassifier, *arguments: Any) -> Any:
        found = before(self, *arguments)
        if self.trainer.global_step == update and not self.trainer.sanity_checking:
            if error is not None:
                raise error
            signal.raise_signal(signal.SIGTERM)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, method, stop)
        yield


@pytest.mark.slow
def test_a_validation_that_a_resumed_run_has_done_is_not_done_again(whole, tiny, tmp_path):
    words = UPDATES
    for stop in (stopping("on_validation_epoch_start", 4, OSError("unplugged")), stopping("on_validation_end", 4)):
        with stop, pytest.raises((SystemExit, OSError)):
            train.run(tiny(*WRITTEN, *words, "resume=true"))
    validated: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageClassifier, "on_validation_start", lambda self: validated.append(self.global_step))
        train.run(tiny(*WRITTEN, *words, "resume=true"))
    assert validated == [8, 11]
    assert result(tmp_path / "run") == whole(words)


@pytest.mark.slow
def test_two_processes_stop_before_a_validation(tmp_path, tiny_overrides):
    words = (*tiny_overrides, *WRITTEN, *EPOCHS[:2], "trainer=ddp_sim", "plugins=[stopper]")
    words += tuple(f"+trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))
    for output, more, environment, code in (
        ("whole", (), {}, 0),
        ("run", (), {"STOP": "4"}, 143),
        ("run", ("resume=true",), {}, 0),
    ):
        process = start_fork(
            ["train", *words, f"output={output}", *more], tmp_path, environment={**os.environ, **environment}
        )
        _, errors = process.communicate(timeout=100)
        assert process.returncode == code, errors
        assert ("stopped; saved as of update 4: " in errors) == (code == 143), errors
    assert result(tmp_path / "run") == result(tmp_path / "whole")
