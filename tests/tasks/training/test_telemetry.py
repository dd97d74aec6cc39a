"""The mixers' reports reach TensorBoard, and the training does not change."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train
from longseq.tasks.training.callbacks import telemetry
from longseq.tasks.training.trainer import build_callbacks, build_trainer

LONGHORN = ("mixer=longhorn", "model.depth=1", "recipe.epochs=1")


def scalars(folder):
    board = EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith("watch/")]
    return {tag: {event.step: event.value for event in board.Scalars(tag)} for tag in tags}


def fit(config, *callbacks):
    torch.manual_seed(0)
    datamodule, task = train.build(config)
    build_trainer(config, [*build_callbacks(config, task), *callbacks]).fit(task, datamodule=datamodule)
    return task


@pytest.mark.slow
def test_each_reading_has_its_charts(tiny, tmp_path):
    train.run(tiny(*LONGHORN, "callbacks.telemetry.every_n_steps=10"))
    found = scalars(tmp_path / "run")
    for order in ("forward", "backward"):
        norms = found[f"watch/blocks.0.{order}/state_norm"]
        assert list(norms) == [9, 19]
        assert all(norm > 0 for norm in norms.values())
    rows, back = (found[f"watch/blocks.0.{order}/state_norm"] for order in ("forward", "backward"))
    assert rows != back


@pytest.mark.slow
def test_the_training_is_the_same_with_and_without(tiny, tmp_path, monkeypatch, caplog):
    """With random draws in each step (drop path, mixing), averaged weights and accumulation.

    The first run also prepares its kernels, as runs on a GPU do.
    """
    caplog.set_level("INFO")
    common = (
        *LONGHORN,
        "trainer.precision=bf16-mixed",
        "model.drop_path_rate=0.3",
        "++recipe.ema={decay: 0.9, warmup: true}",
        "trainer.accumulate_grad_batches=2",
    )
    states = []
    monkeypatch.setattr(telemetry, "is_tested", lambda device_type: not states)
    monkeypatch.setattr(telemetry, "suppress", lambda *_: nullcontext())  # here the computations have a meaning
    for number, override in enumerate(("callbacks.telemetry.every_n_steps=1", "callbacks.telemetry=null")):
        task = fit(tiny(*common, override, f"output={tmp_path / str(number)}"))
        states.append((task.state_dict(), torch.get_rng_state()))
    assert caplog.text.count("prepared the kernels") == 1
    assert states[0][0].keys() == states[1][0].keys()
    assert all(torch.equal(value, states[1][0][name]) for name, value in states[0][0].items())
    assert torch.equal(states[0][1], states[1][1])
    assert scalars(tmp_path / "0")
    assert not scalars(tmp_path / "1")
