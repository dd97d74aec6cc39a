"""The image task: schedule, parameter groups, metrics, randomness."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer

from longseq.tasks import train
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.training.trainer import build_trainer


def parts(config, *callbacks):
    datamodule, task = train.build(config)
    return build_trainer(config, list(callbacks)), task, datamodule


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
