"""A run that continues on another number of devices: the same samples in the same order, each once per epoch."""

from __future__ import annotations

import subprocess

import noted_samples
import pytest
from forked import run_longseq, start_fork

from longseq.tasks.data.sampler import TrainingSampler

SAMPLES, BATCH = 1295, 64  # of digits; what a run of the fixture `tiny` trains on in an update
UPDATES = SAMPLES // BATCH


def train_and_note():
    noted_samples.patch(setattr)
    return run_longseq()


@pytest.fixture
def run(tmp_path, monkeypatch, command_here):
    """Trains up to an update; returns what each process was given: the epoch and the positions of every batch."""

    def call(notes: str, stop_after: int, *words: str) -> list[list[list[int]]]:
        (tmp_path / notes).mkdir()
        monkeypatch.setenv("NOTES", str(tmp_path / notes))
        monkeypatch.setenv("STOP_AFTER", str(stop_after))
        words = ("train", *words, "resume=true")
        if "trainer=ddp_sim" in words:
            process = start_fork(words, tmp_path, run=train_and_note)
            output, errors = process.communicate()
            done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
        else:
            with monkeypatch.context() as patch:
                noted_samples.patch(patch.setattr)
                done = command_here(tmp_path, *words)
        assert done.returncode in (0, 143), done.stderr
        assert "continuing from" in done.stdout or notes == "first", done.stdout
        files = sorted((tmp_path / notes).iterdir())
        return [[[int(word) for word in line.split()] for line in file.read_text().splitlines()] for file in files]

    return call


@pytest.mark.slow
def test_a_run_continues_on_two_devices_and_again_on_one(run, tiny_overrides):
    (first,) = run("first", 7, *tiny_overrides)
    ranks = run("second", 12, *tiny_overrides, "trainer=ddp_sim")  # several processes stop a batch after the signal
    (third,) = run("third", -1, *tiny_overrides, "trainer.accumulate_grad_batches=2")
    seen = [(epoch, positions) for epoch, *positions in first[:7]]
    for one, other in list(zip(*ranks, strict=True))[:6]:
        assert one[0] == other[0]
        seen.append((one[0], deal(one[1:], other[1:])))
    for one, other in zip(third[::2], third[1::2], strict=True):
        seen.append((one[0], deal(one[1:], other[1:])))
    sampler = TrainingSampler(SAMPLES, BATCH, seed=0)
    expected = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        expected += [(epoch, [index.position for index in batch]) for batch in sampler]
    assert len(seen) == 2 * UPDATES
    assert seen == expected


def deal(one: list[int], other: list[int]) -> list[int]:
    return [position for pair in zip(one, other, strict=True) for position in pair]
