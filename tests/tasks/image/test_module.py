"""The image task: schedule, parameter groups, metrics, randomness."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from longseq.tasks import Training, train
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.trainer import build_trainer


class Recorder(Callback):
    """Keeps the learning rate before each update."""

    def __init__(self):
        self.rates = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def parts(config, *callbacks):
    datamodule, task = train.build(config)
    return build_trainer(config, list(callbacks)), task, datamodule


@pytest.mark.slow
def test_the_schedule_warms_up_and_falls_per_update(tiny):
    config = tiny(
        "recipe.epochs=4",
        "recipe.schedule.warmup_epochs=1",
        "recipe.schedule.warmup_lr=0",
        "recipe.schedule.min_lr=0",
        "recipe.learning_rate=0.1",
        "recipe.reference_batch_size=128",
        "trainer.accumulate_grad_batches=2",
        "logger=csv",
    )
    recorder = Recorder()
    trainer, task, datamodule = parts(config, recorder)
    trainer.fit(task, datamodule=datamodule)
    updates = math.ceil(datamodule.batches_per_epoch / 2)
    assert len(recorder.rates) == 4 * updates
    peak = 0.1 * 64 / 128
    assert recorder.rates[0] == 0
    assert recorder.rates[updates // 2] == pytest.approx(peak * (updates // 2) / updates)
    whole = 4 * updates
    for update in (updates, 2 * updates, whole - 1):
        assert recorder.rates[update] == pytest.approx(peak / 2 * (1 + math.cos(math.pi * update / whole)))


def test_recurrence_and_norm_parameters_do_not_decay(tiny):
    config = tiny("mixer=mamba", "model.depth=1")
    trainer, task, datamodule = parts(config)
    trainer.datamodule = datamodule
    task.trainer = trainer
    datamodule.trainer = trainer
    optimizer = task.configure_optimizers()["optimizer"]
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    names = {name for name, parameter in task.backbone.named_parameters() if id(parameter) in decayed}
    assert any("in_proj" in name for name in names)
    assert not any("A_log" in name or name.endswith((".bias", ".D", "norm.weight")) for name in names)
    listed = sum(len(group["params"]) for group in optimizer.param_groups)
    assert listed == len(list(task.backbone.parameters()))


@pytest.mark.slow
def test_metrics_weigh_every_image_alike(tiny):
    config = tiny("data.eval_batch_size=100")
    trainer, task, datamodule = parts(config)
    (tested,) = trainer.test(task, datamodule=datamodule, verbose=False)
    loss, right, total = 0.0, 0, 0
    task.eval()
    with torch.no_grad():
        for images, targets in datamodule.test_dataloader():
            images, targets = datamodule.on_after_batch_transfer((images, targets), 0)
            logits = task(images)
            loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            right += int((logits.argmax(dim=1) == targets).sum())
            total += len(targets)
    assert tested["test/loss"] == pytest.approx(loss / total, rel=1e-5)
    assert tested["test/top1"] == pytest.approx(right / total)
    assert int(task.confusion_matrix.sum()) == total
    assert int(task.confusion_matrix.diagonal().sum()) == right


def test_top5_needs_more_than_five_classes(tiny):
    config = resolve(tiny())
    info = ImageDataModule.from_config(config, 64).info
    few = type(info).from_dict(info.to_dict() | {"num_classes": 5, "class_names": list("abcde")})
    assert "top5" not in ImageClassifier.from_config(config, torch.nn.Identity(), few, None).val_metrics
    assert "top5" in ImageClassifier.from_config(config, torch.nn.Identity(), info, None).val_metrics


class Gradients(Callback):
    """Keeps the gradients of each update."""

    def __init__(self):
        self.found = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found.append(torch.cat([one.grad.flatten() for one in pl_module.parameters()]))


@pytest.mark.slow
def test_the_last_update_of_an_epoch_is_of_the_mean_of_its_batches(tmp_path):
    def sgd(model, lr):
        return torch.optim.SGD(model.parameters(), lr=lr)

    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    training = Training(learning_rate=0.0, optimizer=sgd)
    classifier = ImageClassifier(backbone, num_classes=4, training=training)
    torch.manual_seed(0)
    batches = [(torch.randn(5, 3, 2, 2), torch.randint(4, (5,))) for _ in range(3)]
    alone = []
    for images, labels in batches:
        loss = torch.nn.functional.cross_entropy(backbone(images), labels)
        gradients = torch.autograd.grad(loss, list(backbone.parameters()))
        alone.append(torch.cat([one.flatten() for one in gradients]))
    gradients = Gradients()
    options = {"accumulate_grad_batches": 2, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", callbacks=[gradients], default_root_dir=tmp_path, **options)
    trainer.fit(classifier, torch.utils.data.DataLoader(batches, batch_size=None))
    whole, last = gradients.found
    torch.testing.assert_close(whole, (alone[0] + alone[1]) / 2)
    torch.testing.assert_close(last, alone[2])
    torch.testing.assert_close(trainer.callback_metrics["train/loss"], loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("multi_label", [False, True])
def test_samples_are_ranked_where_their_probabilities_are_near_one(tmp_path, multi_label):
    """In float32 all logits above 17 have the probability 1, and their samples would be equal."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    random = torch.Generator().manual_seed(0)
    targets = torch.randint(2, (400, 2) if multi_label else (400,), generator=random)
    logits = 5 * torch.randn(400, 2, generator=random) + 15
    logits += 4 * (targets if multi_label else torch.nn.functional.one_hot(targets, 2))
    metrics = {"chosen_metrics": {"auroc": True, "average_precision": True}}
    classifier = ImageClassifier(torch.nn.Flatten(), num_classes=2, multi_label=multi_label, **metrics)
    pairs = torch.utils.data.TensorDataset(logits[:, :, None, None], targets.float() if multi_label else targets)
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    (found,) = trainer.test(classifier, torch.utils.data.DataLoader(pairs, batch_size=64))
    scores = logits.double() if multi_label else (logits - logits.flip(1)).double()
    wanted = targets if multi_label else torch.nn.functional.one_hot(targets, 2)
    assert found["test/auroc"] == pytest.approx(roc_auc_score(wanted, scores), abs=1e-6)
    assert found["test/average_precision"] == pytest.approx(average_precision_score(wanted, scores), abs=1e-6)
    assert len(classifier.probabilities(logits).unique()) < 790, "in float32 many of these are equal"
