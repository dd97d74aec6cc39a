"""Batches with different numbers of targets: an update is of the mean over all targets, wherever they are."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import nn

from longseq.tasks.data.loader import find_place
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training

IGNORED = -100
ROWS, PLACES, CLASSES, UPDATES = 8, 6, 3, 2


class Rows(LightningDataModule):
    """Updates of ROWS rows with 0 to PLACES targets each, divided among processes and accumulated batches."""

    tokens_per_epoch = None

    def __init__(self, accumulate):
        super().__init__()
        self.batches_per_epoch = UPDATES * accumulate
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(UPDATES, ROWS, PLACES, 4, generator=random)
        self.targets = torch.randint(CLASSES, (UPDATES, ROWS, PLACES), generator=random)
        self.targets[torch.rand(UPDATES, ROWS, PLACES, generator=random) < 0.3] = IGNORED
        self.targets[0, 1::2] = IGNORED  # nothing to learn from for the second of two parts

    def train_dataloader(self):
        rank, world_size, accumulate = find_place(self.trainer)
        parts = world_size * accumulate
        dealt = [
            tuple(rows[update, turn * world_size + rank :: parts] for rows in (self.inputs, self.targets))
            for update in range(UPDATES)
            for turn in range(accumulate)
        ]
        return torch.utils.data.DataLoader(dealt, batch_size=None)


class Classifier(TrainedModule):
    def __init__(self, training):
        super().__init__(nn.Linear(4, CLASSES, bias=False), training)
        nn.init.ones_(self.backbone.weight)

    @classmethod
    def from_config(cls, config, backbone, info, training):
        raise NotImplementedError

    def count_targets(self, batch):
        return (batch[1] != IGNORED).sum()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        scores = self.backbone(inputs).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return self.mean_of_update(loss)


def plain_sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def constant(optimizer, **options):
    return None, 0


def train(accumulate, clip, **options):
    module = Classifier(Training(learning_rate=0.5, optimizer=plain_sgd, schedule=constant))
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        use_distributed_sampler=False,
        max_epochs=1,
        **silent,
        **options,
    )
    trainer.fit(module, datamodule=Rows(accumulate))
    return module, trainer.callback_metrics["train/loss"]


def expected(clip):
    """The weights after the updates by autograd, over all targets of each at once, and the loss of the last one."""
    data, weight = Rows(1), torch.ones(CLASSES, 4, requires_grad=True)
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        scores = (inputs @ weight.T).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, targets.flatten())
        (gradient,) = torch.autograd.grad(loss, weight)
        length = float(gradient.norm())
        weight = (weight - 0.5 * gradient * min(1.0, clip / length if clip else 1.0)).detach().requires_grad_()
    return weight, loss.detach()


def check(accumulate, clip, **options):
    (module, logged), (weight, loss) = train(accumulate, clip, **options), expected(clip)
    torch.testing.assert_close(module.backbone.weight, weight)
    torch.testing.assert_close(logged, loss)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_an_update_is_of_the_mean_over_its_targets(accumulate, clip):
    check(accumulate, clip)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_so_over_two_processes(accumulate):
    check(accumulate, 0.05, strategy="ddp_fork", devices=2)


class Means(LightningDataModule):
    """Three batches of four samples for each process."""

    def train_dataloader(self):
        rank, world_size, _ = find_place(self.trainer)
        return torch.utils.data.DataLoader(mean_batches(3 * world_size)[rank::world_size], batch_size=None)


def mean_batches(count):
    return list(torch.randn(count, 4, 5, generator=torch.Generator().manual_seed(1)))


class Regression(TrainedModule):
    """Keeps the gradients of its updates, which change the weights only where it `learns`."""

    def __init__(self, learns):
        training = Training(learning_rate=1.0 if learns else 0.0, optimizer=plain_sgd, schedule=constant)
        super().__init__(nn.Linear(5, 1, bias=False), training)
        nn.init.ones_(self.backbone.weight)
        self.found = []

    def training_step(self, batch, batch_idx):
        return mean_loss(self.backbone.weight, batch)

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.found.append(self.backbone.weight.grad.clone())


def mean_loss(weight, batch):
    return (batch @ weight.T).square().mean()


def fit_means(accumulate, *, learns=False, **options):
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module = Regression(learns)
    trainer = Trainer(
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        max_epochs=1,
        **silent,
        **options,
    )
    trainer.fit(module, datamodule=Means())
    return module


def mean_gradients(count):
    """The gradient of each batch by autograd."""
    weight = torch.ones(1, 5, requires_grad=True)
    return [torch.autograd.grad(mean_loss(weight, batch), weight)[0] for batch in mean_batches(count)]


@pytest.mark.slow
def test_an_update_of_fewer_batches_than_others_is_of_their_mean():
    alone = mean_gradients(3)
    whole, last = fit_means(2).found
    assert torch.equal(whole, alone[0] / 2 + alone[1] / 2), "a whole update is not touched"
    torch.testing.assert_close(last, alone[2])
    (three,) = fit_means(4).found
    torch.testing.assert_close(three, sum(alone) / 3)
    assert all(map(torch.equal, fit_means(1).found, alone))


@pytest.mark.slow
def test_an_update_of_fewer_batches_is_of_their_mean_over_two_processes():
    module = fit_means(4, learns=True, strategy="ddp_fork", devices=2)
    torch.testing.assert_close(1 - module.backbone.weight, sum(mean_gradients(6)) / 6)
