"""A run that is killed in the middle of an epoch, and resumed, is bitwise the run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import make_rows, write_jsonl
from forked import start_fork

ALL = (
    "trainer=cpu data.root=rows.jsonl data.cache=cache data.validation=0.2 data.test=0.2 model.d_model=16 "
    "model.depth=1 model.dropout=0.1 recipe.schedule.warmup_updates=2 callbacks.checkpoint.every_n_train_steps=1"
)
# Each with what makes its order of samples, or its state, harder to continue, and random numbers in the model.
RUNS = {
    "streams": (
        "task=lm data=text mixer=gated_deltanet data.packing=streams data.reset_state=true data.window=16 "
        f"recipe.batch_size=64 {ALL}"
    ),
    "crops_in_segments": (
        "task=document data=documents mixer=gated_deltanet data.max_length=128 data.truncation=middle "
        f"data.random_crops=true data.segment=48 recipe.batch_size=384 {ALL}"
    ),
}
# The places of tests/support/killer.py.
PLACES = ("training_step", "on_before_optimizer_step", "on_train_batch_end", "on_save_checkpoint", "writing")
STATES = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")


def words_of(run: str, output: str, updates: int, validate: int = 100) -> tuple[str, ...]:
    length = ("recipe.epochs=null", f"recipe.updates={updates}", f"recipe.validate_every_updates={validate}")
    return (*RUNS[run].split(), *length, f"output={output}", "resume=true")


def kill(folder: Path, commands: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Run `longseq train` in processes of their own, each of which is killed at its PLACE:UPDATE."""
    for at, words in commands:
        process = start_fork(("train", "plugins=[killer]", *words), folder, environment={**os.environ, "KILL": at})
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors


def last(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def assert_same_states(one: Any, other: Any) -> None:
    """Two values of checkpoints are bitwise equal."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same_states(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for value, twin in zip(one, other, strict=True):
            assert_same_states(value, twin)
    else:
        assert one == other


def assert_same_runs(one: Path, other: Path) -> None:
    first, second = last(one), last(other)
    for name in (*STATES, *(["carried_state"] if "carried_state" in first else [])):
        assert_same_states(first[name], second[name])
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (one, other)]
    measured = [{key: value for key, value in found.items() if key.startswith(("test/", "val/"))} for found in metrics]
    assert measured[0] == measured[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "rows.jsonl", make_rows(90))
    return tmp_path


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(folder: Path, command_here: Callable[..., Any]) -> None:
    run, checkpoints = "crops_in_segments", folder / "cut" / "checkpoints"
    kill(folder, [("writing:5", words_of(run, "cut", 7))])
    assert (checkpoints / "last.ckpt.partial").is_file()
    assert last(folder / "cut")["global_step"] == 4, "the former checkpoint is whole"
    for output in ("cut", "whole"):
        done = command_here(folder, "train", *words_of(run, output, 7))
        assert done.returncode == 0, done.stderr
        assert ("continuing from" in done.stdout) == (output == "cut")
    assert not (checkpoints / "last.ckpt.partial").exists()
    assert_same_runs(folder / "whole", folder / "cut")


@pytest.mark.soak
@pytest.mark.parametrize("run", RUNS)
def test_twenty_kills_at_random_updates_and_as_many_resumes_end_as_one_run(
    run: str, folder: Path, command_here: Callable[..., Any]
) -> None:
    chosen = random.Random(18)
    kills = [(chosen.choice(PLACES), update) for update in sorted(chosen.sample(range(2, 60), 20))]
    print(kills)
    kill(folder, [(f"{place}:{update}", words_of(run, "cut", 60, validate=7)) for place, update in kills])
    update = kills[-1][1]
    assert update - 1 <= last(folder / "cut")["global_step"] <= update, "each run has gone on from the one before"
    for output in ("cut", "whole"):
        assert command_here(folder, "train", *words_of(run, output, 60, validate=7)).returncode == 0
    assert_same_runs(folder / "whole", folder / "cut")
