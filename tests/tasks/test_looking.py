"""What a run shows while it trains and afterwards: its progress, its hyper-parameters, its rates."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from longseq.tasks import train
from longseq.tasks.training.callbacks.progress import _Facts

SLOW = pytest.mark.slow  # they share a training


@pytest.fixture(scope="module")
def run(tmp_path_factory, compose_config, tiny_overrides):
    """A run of two epochs of the digits: its folder, what it printed without a terminal, and its events."""
    folder = tmp_path_factory.mktemp("shown") / "run"
    often = ("recipe.epochs=2", "callbacks.progress.line_seconds=0")
    config = compose_config("train", *tiny_overrides, *often, f"output={folder}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", printed := io.StringIO())
        train.run(config)
    return SimpleNamespace(
        folder=folder, lines=printed.getvalue().splitlines(), board=EventAccumulator(str(folder)).Reload()
    )


@SLOW
def test_without_a_terminal_lines_tell_the_progress(run):
    assert not any("━" in line for line in run.lines)
    epochs = [line for line in run.lines if re.match(r"epoch \d/2  train/loss \S+  val/loss \S+  val/top1 ", line)]
    assert len(epochs) == 2
    assert re.search(r"  \d+ images/s  val \d+ images/s  \d+\.\d\d GiB  0:\d\d:\d\d left$", epochs[0])
    assert epochs[1].endswith(" GiB"), "nothing is left"
    updates = [line for line in run.lines if re.match(r"epoch 1/2  update 7/40  train/loss \S+  \d+ images/s  ", line)]
    assert len(updates) == 1
    assert any(line == "validating: batch 1 of 1" for line in run.lines)


@SLOW
def test_rates_and_memory_follow_each_validation(run):
    assert [event.step for event in run.board.Scalars("throughput/val_images_per_second")] == [19, 39]
    assert all(event.value > 10 for event in run.board.Scalars("throughput/test_images_per_second"))
    assert all(0.05 < event.value < 20 for event in run.board.Scalars("throughput/memory_gib"))


@SLOW
def test_hyper_parameters_are_those_that_matter(run):
    content = run.board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = {
        name: value.string_value or value.number_value
        for name, value in parse_session_start_info_plugin_data(content).hparams.items()
    }
    assert shown.pop("parameters") > 1000
    assert shown == {
        "task": "image",
        "data": "digits",
        "model": "longseq_tiny_patch16_224",
        "mixer": "attention",
        "scale": "nano",
        "recipe": "digits",
        "learning_rate": 2e-3,
        "batch_size": 64,
        "epochs": 2,
        "seed": 0,
    }
    metrics = str(run.board.summary_metadata["_hparams_/experiment"])
    assert "test/top1" in metrics
    assert "val/top1" not in metrics


@pytest.mark.parametrize("width", [80, 60, 132])
def test_the_bar_stays_on_its_line(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, record=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), _Facts(console))
    progress = Progress(*columns, console=console, expand=True, auto_refresh=False)
    values = ["train/loss 2.1234", "val/balanced_accuracy 0.8123"]
    progress.add_task("epoch 120/300", total=10, left="12:34:56 left", rate="123456 images/s", values=values)
    console.print(progress.get_renderable())
    (line,) = console.export_text().splitlines()
    assert len(line) <= width
    assert "12:34:56 left" in line
    assert ("val/balanced_accuracy 0.8123" in line) == (width > 80)
    assert line.count("━") + line.count("╺") + line.count("╸") >= 6
    assert "…" not in line
