"""The rates of timm's and torch's schedules in a run of updates."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim import lr_scheduler

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.muon import create_muon
from longseq.tasks.training.recipe import ADAMW, Training
from longseq.tasks.training.schedule import Epoch, RunLength

EPOCH, EPOCHS = 5, 4
LAST = EPOCH * EPOCHS
SILENT = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Plain(TrainedModule):
    """Trains one weight on nothing."""

    def __init__(self, training):
        super().__init__(nn.Linear(1, 1, bias=False), training)

    def training_step(self, batch, batch_idx):
        self.log("constant", 1.0)
        return self.backbone.weight.sum()


def plain_sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def make(length, **options):
    schedule = partial(create_scheduler_v2, warmup_lr=0.0, step_on_epochs=False, **options)
    return Plain(Training(learning_rate=1.0, optimizer=plain_sgd, schedule=schedule, length=length))


def configure(length, **options):
    module = make(length, **options)
    module._known_epoch = Epoch(EPOCH)
    module.trainer = Trainer(accelerator="cpu", max_epochs=EPOCHS, **SILENT)
    return module.configure_optimizers()


def read_rates(configured):
    """The rate of each update, and after these the one with which the schedule ends."""
    scheduler, rates = configured["lr_scheduler"]["scheduler"], []
    for update in range(LAST + 1):
        scheduler.step_update(update)
        rates.append(configured["optimizer"].param_groups[0]["lr"])
    return rates


@pytest.mark.slow
@pytest.mark.parametrize("sched", ["cosine", "poly", "wsd"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_updates": 3}, {"warmup_epochs": 0.4}])
def test_a_schedule_that_begins_after_its_warmup_ends_with_the_run(sched, warmup):
    length = RunLength(epochs=EPOCHS, **warmup)
    rates = read_rates(configure(length, sched=sched, min_lr=0.01, warmup_prefix=True))
    risen = round(length.count_warmup_epochs(Epoch(EPOCH)) * EPOCH)
    assert rates[risen] == 1.0
    assert max(rates[:risen], default=0.0) < 1.0
    assert rates[LAST] == pytest.approx(0.01)
    assert rates[LAST - 1] > 0.011
    if sched == "cosine":
        part = (LAST - 1 - risen) / (LAST - risen)
        assert rates[LAST - 1] == pytest.approx(0.01 + 0.99 / 2 * (1 + math.cos(math.pi * part)))
    if sched == "wsd":
        assert rates == read_rates(configure(length, sched=sched, min_lr=0.01, warmup_prefix=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "falls"),
    [
        ({"sched": "step", "decay_epochs": 1}, [5, 10, 15, 20]),
        ({"sched": "multistep", "decay_milestones": [1, 3]}, [5, 15]),
        ({"sched": "multistep", "decay_milestones": [0.5, 3]}, [3, 15]),
    ],
)
def test_a_rate_falls_with_the_first_update_of_an_epoch(options, falls):
    configured = configure(RunLength(epochs=EPOCHS), **options)
    rates = read_rates(configured)
    assert [update for update in range(1, LAST + 1) if rates[update] < rates[update - 1]] == falls


class Rates(Callback):
    """Keeps the rates of the parameter groups at each update, and the updates after which a validation began."""

    def __init__(self):
        self.rates, self.validated = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_validation_start(self, trainer, module):
        self.validated.append(trainer.global_step)


class Measured(Plain):
    """Its validation measures nothing."""

    def validation_step(self, batch, batch_idx):
        pass


class Stream(torch.utils.data.IterableDataset):
    """An epoch of samples without a known number."""

    def __iter__(self):
        return iter(torch.zeros(EPOCH, 1))


def train(training, *callbacks, data=None, ckpt_path=None, **options):
    """The Trainer after a fit, and what `Rates` has kept."""
    kept = Rates()
    limits = {"max_epochs": EPOCHS, "accelerator": "cpu", **SILENT, **options}
    loader = torch.utils.data.DataLoader(torch.zeros(EPOCH, 1) if data is None else data)
    trainer = Trainer(callbacks=[kept, *callbacks], **limits)
    trainer.fit(Measured(training), loader, torch.utils.data.DataLoader(torch.zeros(3, 1)), ckpt_path=ckpt_path)
    return trainer, kept


def cosine_over(updates):
    return [(1 + math.cos(math.pi * update / updates)) / 2 for update in range(updates)]


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, RunLength(epochs=EPOCHS)])
def test_a_schedule_of_timm_is_one_of_updates_where_it_does_not_say(length):
    training = Training(learning_rate=1.0, optimizer=plain_sgd, schedule=create_scheduler_v2, length=length)
    assert [rates[0] for rates in train(training)[1].rates] == pytest.approx(cosine_over(LAST))


SCALES = (0.25, 1.0)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.zeros(1)) for _ in range(2))


def by_layer(model, lr, scales=SCALES):
    groups = zip((model.weight, model.other), scales, strict=True)
    return torch.optim.SGD([{"params": [weight], "lr_scale": scale} for weight, scale in groups], lr=lr, momentum=0.9)


SCHEDULES = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=LAST + 1),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, LAST - 4)],
        milestones=[4],
    ),
}


def layered(schedule):
    training = Training(learning_rate=1.0, optimizer=by_layer, schedule=lambda optimizer, **_: (schedule(optimizer), 0))
    kept = Rates()
    module = Measured(training)
    module.backbone = TwoLayers()
    return module, kept


def test_rates_by_layer_hold_without_a_schedule():
    module, kept = layered(lambda optimizer: None)
    trainer = Trainer(callbacks=[kept], max_epochs=1, accelerator="cpu", **SILENT)
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(EPOCH, 1)))
    assert kept.rates == EPOCH * [list(SCALES)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_by_layer_hold_at_every_update_with_schedules_of_torch(name, tmp_path):
    schedule, loader = SCHEDULES[name], torch.utils.data.DataLoader(torch.zeros(EPOCH, 1))
    group = by_layer(TwoLayers(), 1.0, (1.0, 1.0))
    alone, wanted = schedule(group), []
    for _ in range(LAST):
        wanted.append(group.param_groups[0]["lr"])
        group.step()
        alone.step()
    module, kept = layered(schedule)
    Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[kept], **SILENT).fit(module, loader)
    for index, scale in enumerate(SCALES):
        assert [rates[index] / scale for rates in kept.rates] == pytest.approx(wanted, rel=1e-9), name
    module, kept = layered(schedule)
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[kept], **SILENT)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    module, kept = layered(schedule)
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[kept], **SILENT)
    trainer.fit(module, loader, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert [rates[0] / SCALES[0] for rates in kept.rates] == pytest.approx(wanted[2 * EPOCH :], rel=1e-9)


def counted(updates=2 * EPOCH + 2, **options):
    return Training(learning_rate=1.0, optimizer=plain_sgd, length=RunLength(updates=updates, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "accumulate"), [(3, 1), (2 * EPOCH, 1), (EPOCH, 2), (2 * EPOCH + 2, 2)])
def test_a_loader_without_a_length_is_read_until_the_last_update(updates, accumulate):
    trainer, kept = train(counted(updates), data=Stream(), accumulate_grad_batches=accumulate)
    assert trainer.global_step == updates
    assert [rates[0] for rates in kept.rates] == pytest.approx(cosine_over(updates))
    epoch = math.ceil(EPOCH / accumulate)
    assert kept.validated[-1] == updates
    assert [update for update in kept.validated[1:] if update < updates] == list(range(epoch, updates, epoch))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [EPOCH, 7, 12])
def test_it_continues_until_the_last_update(stop, tmp_path):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer, kept = train(counted(), save, data=Stream(), enable_checkpointing=True)
    assert trainer.global_step == len(kept.rates) == 12
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer, kept = train(counted(), data=Stream(), ckpt_path=tmp_path / f"step={stop}.ckpt")
    assert trainer.global_step == 12
    assert [rates[0] for rates in kept.rates] == pytest.approx(cosine_over(12)[stop:])
    trainer, kept = train(counted(), data=Stream(), ckpt_path=tmp_path / "end.ckpt")
    assert (trainer.global_step, kept.rates) == (12, [])


class SaveInLastValidation(Callback):
    """Ends the run in its last validation, and saves it then."""

    def __init__(self, file):
        self.file = file

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step == 12 and batch_idx == 1 and not self.file.exists():
            trainer.save_checkpoint(self.file)
            raise InterruptedError


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "every"), [(False, None), (False, 5), (True, 4)])
def test_a_run_that_ended_in_its_last_validation_trains_no_more(streams, every, tmp_path):
    data = {"data": Stream()} if streams else {}
    save = SaveInLastValidation(tmp_path / "last.ckpt")
    with pytest.raises(InterruptedError):
        train(counted(validate_every_updates=every), save, **data)
    trainer, kept = train(counted(validate_every_updates=every), save, ckpt_path=save.file, **data)
    assert (trainer.global_step, kept.rates) == (12, [])


MATRICES = (*(f"mixer.{name}" for name in ("receptance", "key", "value", "out_proj")), "mlp.fc1", "mlp.fc2")


@pytest.mark.parametrize("layer_decay", [None, 0.5])
@pytest.mark.parametrize("optimizer", [ADAMW, create_muon], ids=["adamw", "muon"])
def test_the_base_of_rwkv7_s_decay_learns_at_twice_the_rate(optimizer, layer_decay):
    model = TokenBackbone(vocab_size=5, d_model=8, depth=2, mixer="rwkv7", mlp="rwkv7")
    chosen = partial(optimizer, weight_decay=0.1, layer_decay=layer_decay)
    module = Plain(Training(learning_rate=1.0, optimizer=chosen))
    module.backbone, module._known_epoch = model, Epoch(EPOCH)
    module.trainer = Trainer(accelerator="cpu", max_epochs=EPOCHS, **SILENT)
    configured = module.configure_optimizers()
    configured["lr_scheduler"]["scheduler"].step_update(LAST // 2)
    groups = configured["optimizer"].param_groups
    rates, decays = ({id(p): group[key] for group in groups for p in group["params"]} for key in ("lr", "weight_decay"))
    assert len(rates) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for index, block in enumerate(model.blocks):
        expected = 0.5 if layer_decay is None else 0.5 * 0.5 ** (1 - index)
        found = {name: rates[id(parameter)] for name, parameter in block.named_parameters()}
        assert found.pop("mixer.decay_base") == pytest.approx(2 * expected)
        assert found == pytest.approx(dict.fromkeys(found, expected))
    matrices = {"embedding.weight", *(f"blocks.{index}.{name}.weight" for index in range(2) for name in MATRICES)}
    assert {name for name, parameter in model.named_parameters() if decays[id(parameter)]} == matrices
