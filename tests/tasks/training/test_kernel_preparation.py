"""Kernels are prepared before the first update, which does not change the training."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from longseq.tasks import train
from longseq.tasks.training.callbacks import kernels
from longseq.tasks.training.trainer import build_callbacks, build_trainer

IMAGES = ("mixer=longhorn", "model.depth=1", "recipe.epochs=1")
DRAWS = (
    "model.drop_path_rate=0.3",
    "++recipe.ema={decay: 0.9, warmup: true}",
    "trainer.precision=bf16-mixed",
    "trainer.accumulate_grad_batches=2",
)
PROBE = ("task=probe", "mixer=deltanet", "model.d_model=16", "model.depth=1", "recipe.updates=2", "recipe.epochs=null")


def fit(config):
    torch.manual_seed(0)
    datamodule, task = train.build(config)
    build_trainer(config, build_callbacks(config, task)).fit(task, datamodule=datamodule)
    return task.state_dict(), torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("words", [(*IMAGES, *DRAWS), PROBE], ids=["image", "probe"])
def test_the_training_is_the_same_with_and_without(words, tiny, compose_config, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    states = []
    monkeypatch.setattr(kernels, "is_tested", lambda device_type: not states)
    monkeypatch.setattr(kernels, "suppress", lambda *_: nullcontext())  # here the computations have a meaning
    for number in range(2):
        output = f"output={tmp_path / str(number)}"
        is_probe = words is PROBE
        config = compose_config("train", *words, "trainer=cpu", output) if is_probe else tiny(*words, output)
        states.append(fit(config))
    assert caplog.text.count("prepared the kernels") == 1
    assert states[0][0].keys() == states[1][0].keys()
    assert all(torch.equal(value, states[1][0][name]) for name, value in states[0][0].items())
    assert torch.equal(states[0][1], states[1][1])
