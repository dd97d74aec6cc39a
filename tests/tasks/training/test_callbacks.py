"""Averaging, guards, checkpoints, measurements and pictures around the training steps."""

from __future__ import annotations

import contextlib

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from longseq.tasks import train
from longseq.tasks.training.callbacks.checkpoint import LastCheckpoint
from longseq.tasks.training.callbacks.weights import ExponentialMovingAverage, NonFiniteError, NonFiniteStop
from longseq.tasks.training.trainer import build_trainer

HEAD = "head.weight"
INNER = "blocks.1.mixer.in_proj.weight"


class NaNLoss(torch.nn.Module):
    def forward(self, logits, targets):
        return (logits * float("nan")).sum()


def fit(config, *callbacks):
    datamodule, task = train.build(config)
    trainer = build_trainer(config, list(callbacks))
    trainer.fit(task, datamodule=datamodule)
    return trainer, task


class AtUpdate(Callback):
    """Calls a function with the task before or after one update."""

    def __init__(self, update, function):
        self.update, self.function = update, function

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.update - 1:
            self.function(pl_module)


class Weights(Callback):
    """Records the head's weight after each update, and at each validation."""

    def __init__(self):
        self.trained, self.validated = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.trained.append(pl_module.backbone.get_parameter(HEAD).detach().clone())

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.validated.append(pl_module.backbone.get_parameter(HEAD).detach().clone())


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_follows_its_formula_and_is_validated(warmup, tiny):
    average, weights = ExponentialMovingAverage(decay=0.8, warmup=warmup), Weights()
    config = tiny("recipe.epochs=1")
    datamodule, task = train.build(config)
    expected = task.backbone.get_parameter(HEAD).detach().clone()
    build_trainer(config, [average, weights]).fit(task, datamodule=datamodule)
    for n, weight in enumerate(weights.trained, start=1):
        decay = min(0.8, (1 + n) / (10 + n)) if warmup else 0.8
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(weights.validated[0], expected)
    assert not torch.equal(weights.validated[0], weights.trained[-1])
    torch.testing.assert_close(task.backbone.get_parameter(HEAD).detach(), expected)


@pytest.mark.slow
def test_an_interrupted_validation_leaves_the_weights_as_trained(tiny):
    class Interrupt(Callback):
        def on_validation_batch_start(self, *_):
            raise OSError("unplugged")

    weights, tasks = Weights(), []
    keep = AtUpdate(1, tasks.append)
    with pytest.raises(OSError, match="unplugged"):
        fit(tiny("recipe.epochs=1"), ExponentialMovingAverage(decay=0.8), weights, keep, Interrupt())
    assert torch.equal(tasks[0].backbone.get_parameter(HEAD), weights.trained[-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda task: task.backbone.get_parameter(INNER).data.fill_(float("nan")), f"parameter {INNER} went"),
        (
            lambda task: task.backbone.get_parameter(HEAD).register_hook(lambda gradient: gradient * float("inf")),
            "gradient of head.weight went non-finite first",
        ),
        (
            lambda task: setattr(task, "criterion", NaNLoss()),
            "the loss went non-finite first",
        ),
    ],
    ids=["parameter", "gradient", "loss"],
)
@pytest.mark.slow
def test_divergence_stops_with_the_update_and_what_went_first(spoil, message, tiny, tmp_path):
    last = LastCheckpoint(str(tmp_path), every_n_train_steps=4)
    with pytest.raises(NonFiniteError, match=message) as caught:
        fit(tiny("recipe.gradient_clip=null"), AtUpdate(7, spoil), NonFiniteStop(every_n_steps=5), last)
    assert "diverged at step 7" in str(caught.value)
    saved = torch.load(last.path, weights_only=True)
    assert saved["global_step"] == 4
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values() if value.is_floating_point())


@pytest.mark.slow
def test_an_error_within_a_step_leaves_the_statistics_of_the_update_before(compose_config, tmp_path):
    """A batch norm changes its statistics in the forward pass, before an update."""
    known = ("model=timm", "model.name=test_resnet", "trainer=cpu", "recipe.batch_size=64", "recipe.epochs=1")
    config = compose_config("train", *known, "recipe.ema=null", f"output={tmp_path / 'run'}")
    trained = []

    class Fail(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            trained.append({name: value.clone() for name, value in pl_module.state_dict().items()})

        def on_after_backward(self, trainer, pl_module):
            if trainer.global_step == 3:
                raise OSError("disk full")

    last = LastCheckpoint(str(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        fit(config, Fail(), last)
    saved = torch.load(last.path, weights_only=True)
    assert saved["global_step"] == len(trained) == 3
    assert any(name.endswith("running_mean") for name in trained[-1])
    for name, value in trained[-1].items():
        assert torch.equal(saved["state_dict"][name], value), name


@pytest.mark.slow
def test_infinite_gradients_under_a_loss_scaler_do_not_stop(tiny):
    config = tiny("recipe.epochs=1", "recipe.gradient_clip=null")
    datamodule, task = train.build(config)
    spoilt = []

    def spoil(gradient):
        spoilt.append(1)
        return gradient * (float("inf") if len(spoilt) == 3 else 1.0)

    task.backbone.get_parameter(HEAD).register_hook(spoil)
    trainer = build_trainer(config, [NonFiniteStop(every_n_steps=1)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    precision = trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)
    precision.forward_context = contextlib.nullcontext
    trainer.fit(task, datamodule=datamodule)
    assert len(spoilt) > 3
    assert scaler.get_scale() < 2.0
    assert torch.isfinite(task.backbone.get_parameter(HEAD)).all()


class Norms(Callback):
    """Notes the norm of the gradients with which each update was made."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        gradients = [x.grad.flatten() for x in pl_module.parameters() if x.grad is not None]
        self.found.append(float(torch.cat(gradients).norm()))


@pytest.mark.parametrize(("precision", "fused"), [("bf16-mixed", False), ("32-true", True), ("bf16-mixed", True)])
@pytest.mark.slow
def test_a_fused_optimizer_clips_too(fused, precision, tiny):
    config = tiny(
        f"+recipe.optimizer.fused={str(fused).lower()}",
        "recipe.gradient_clip=1e-3",
        f"trainer.precision={precision}",
        "recipe.epochs=null",
        "recipe.updates=2",
    )
    fit(config, norms := Norms())
    assert norms.found == pytest.approx([1e-3, 1e-3], rel=1e-2)
