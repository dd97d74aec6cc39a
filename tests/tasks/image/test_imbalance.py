"""Classes of different sizes, and several labels an image: weights, sampling, metrics, thresholds, tables."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import start_fork
from image_data import image_data, write_digits
from lightning.pytorch import Trainer
from sklearn import metrics as sk
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional

from longseq.tasks.data.labels import count_classes, find_weights, rarest_labels
from longseq.tasks.data.sampler import TrainingSampler
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.image.transforms import BatchMixing
from longseq.tasks.training.metrics import choose_threshold, decide, make_metrics, update_metrics

CLASSES = np.repeat([0, 1, 2], [70, 20, 6])

INFO = {"img_size": 2, "in_chans": 1, "mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 1.0}


def drawn(epoch=0, batch_size=12, **options):
    sampler = TrainingSampler(len(CLASSES), batch_size, classes=CLASSES, **({"seed": 3} | options))
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_balanced_epoch_has_each_class_equally_often():
    samples = list(itertools.chain(*drawn()))
    assert len(samples) == len(CLASSES)
    assert set(Counter(CLASSES[one.position] for one in samples).values()) == {32}
    assert len(set(samples)) == len(samples)  # a sample that comes again is augmented anew
    rare = Counter(one.position for one in samples if CLASSES[one.position] == 2)
    assert sorted(rare.values()) == [5, 5, 5, 5, 6, 6]
    common = [one.position for one in samples if CLASSES[one.position] == 0]
    assert len(set(common)) == len(common)
    assert all(Counter(CLASSES[one.position] for one in batch) == {0: 4, 1: 4, 2: 4} for batch in drawn())
    repeated = list(itertools.chain(*drawn(repeats=2)))
    assert len(set(repeated)) == len(repeated) == 96
    assert repeated[0].position == repeated[1].position


def test_balanced_weights_are_those_of_scikit_learn():
    counts = count_classes(CLASSES, 4)
    weights = find_weights("balanced", counts, len(CLASSES), "abcd", multi_label=False)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=CLASSES)
    assert weights == pytest.approx([*expected, 1.0])
    rows = np.array([[1, 0], [1, 1], [1, 0], [0, 0]])
    assert find_weights("balanced", count_classes(rows, 2), 4, "ab", multi_label=True) == pytest.approx([1 / 3, 3])
    assert find_weights({"c": 2}, counts, 96, "abcd", multi_label=False) == [1, 1, 2, 1]
    assert find_weights([1, 2, 3, 4], counts, 96, "abcd", multi_label=False) == [1, 2, 3, 4]
    # As a command line reads the names of these classes.
    named = {3: 2.0, True: 5.0, "b": 3.0}
    assert find_weights(named, counts, 96, ["3", "true", "b", "c"], multi_label=False) == [2, 5, 3, 1]
    assert rarest_labels(np.array([[1, 0], [1, 1], [0, 0]])).tolist() == [0, 1, -1]


@pytest.mark.parametrize("mode", ["batch", "elem"])
@pytest.mark.parametrize("kind", ["softmax", "bce", "several"])
def test_a_mixed_image_has_the_weighted_losses_of_both_images(kind, mode):
    """The definition, image by image: share x weight x smoothed loss, of each of the two images."""
    weights = torch.tensor([0.2, 1.0, 3.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    images, logits = (torch.rand(6, *shape, generator=generator) for shape in ((1, 8, 8), (4,)))
    targets = torch.tensor([0, 1, 2, 3, 0, 2])
    if kind == "several":
        targets = (torch.rand(6, 4, generator=generator) > 0.5).float()
    options = {"mixup": 0.8, "cutmix": 1.0, "mode": mode, "seed": 0}
    shares = BatchMixing(6, **options)(images.clone(), torch.arange(6), update=3)[1]
    assert ((shares > 0) & (shares < 1)).any()
    mixing = BatchMixing(
        4, **options, label_smoothing=0.1, class_weights=weights.tolist(), multi_label=kind == "several"
    )
    mixed, soft, found = mixing(images.clone(), targets, update=3)
    assert torch.equal(mixed, BatchMixing(4, **options)(images.clone(), targets.long().view(6, -1)[:, 0], update=3)[0])
    module = ImageClassifier(
        torch.nn.Identity(), num_classes=4, binary_cross_entropy=kind == "bce", multi_label=kind == "several"
    )

    def loss(i: int, j: int) -> torch.Tensor:
        """Of the logits of image i, for the target of image j."""
        if kind == "several":
            each = functional.binary_cross_entropy_with_logits(logits[i], targets[j] * 0.9 + 0.05, reduction="none")
            return (each * torch.where(targets[j] > 0, weights, 1.0)).mean()
        if kind == "bce":
            smooth = functional.one_hot(targets[j], 4) * 0.9 + 0.025
            return weights[targets[j]] * functional.binary_cross_entropy_with_logits(logits[i], smooth)
        return weights[targets[j]] * functional.cross_entropy(logits[i], targets[j], label_smoothing=0.1)

    expected = sum(shares[i, j] * loss(i, j) for i in range(6) for j in range(6)) / 6
    torch.testing.assert_close(module._weighted(logits, soft, found), expected)


@pytest.mark.parametrize("bce", [False, True])
def test_labels_as_probabilities_have_the_weights_of_the_classes(bce):
    weights = [0.2, 1.0, 3.0, 0.0]
    generator = torch.Generator().manual_seed(0)
    logits, rows = (torch.rand(6, 4, generator=generator) for _ in range(2))
    rows, targets = rows.softmax(dim=1), torch.tensor([0, 1, 2, 3, 0, 2])
    info = DataInfo(**INFO | {"class_names": list("abcd"), "num_classes": 4, "class_weights": weights})
    module = ImageClassifier(torch.nn.Identity(), num_classes=4, info=info, binary_cross_entropy=bce)
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module.log = module.seed_batch = lambda *_: (0, 0)
    found, numbers, hot = (
        module.training_step((logits, labels), 0) for labels in (rows, targets, functional.one_hot(targets, 4))
    )
    assert torch.equal(numbers, hot)
    if bce:
        each = [
            functional.binary_cross_entropy_with_logits(logits, one.expand(6, 4), reduction="none").mean(1)
            for one in torch.eye(4)
        ]
        expected = (torch.stack(each, dim=1) * rows * torch.tensor(weights)).sum(1).mean()
    else:
        expected = functional.cross_entropy(logits, rows, weight=torch.tensor(weights))
    torch.testing.assert_close(found, expected)


def test_thresholds_are_the_best_of_all():
    random = np.random.default_rng(0)
    for _ in range(20):
        targets = random.random(60) < 0.2
        scores = np.round(np.clip(0.3 * targets + 0.6 * random.random(60), 0, 1), 2)  # some are equal
        precision, recall, _ = sk.precision_recall_curve(targets, scores)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-9)
        false, true, _ = sk.roc_curve(targets, scores, drop_intermediate=False)
        pairs = (("f1", f1.max(), sk.f1_score), ("balanced_accuracy", (true - false + 1).max() / 2, None))
        for criterion, best, score in pairs:
            found = choose_threshold(torch.tensor(scores), torch.tensor(targets), criterion)
            assert found not in scores
            score = score or sk.balanced_accuracy_score
            assert score(targets, scores >= found) == pytest.approx(best)
    assert choose_threshold(torch.rand(4), torch.zeros(4), "f1") == 0.5
    scores, targets = torch.tensor([torch.nan, 0.8, 0.2]), torch.tensor([1, 1, 0])
    assert choose_threshold(scores, targets, "f1") == pytest.approx(0.5)
    assert choose_threshold(scores[::2], targets[::2], "f1") == 0.5


def test_metrics_are_those_of_scikit_learn():
    random = np.random.default_rng(1)
    scores = random.dirichlet([1] * 4, 200)
    classes = random.integers(0, 3, 200)  # the last class is predicted, and never there
    own = {"f2": {"_target_": "MulticlassFBetaScore", "beta": 2.0, "average": "macro"}, "f1_weighted": True}
    found = measure(make_metrics(4, chosen=own, metric="val/cohen_kappa"), scores, classes)
    picked = scores.argmax(1)
    assert found.keys() == {"top1", "f1", "balanced_accuracy", "f1_weighted", "cohen_kappa", "f2"}
    assert found["top1"] == pytest.approx(sk.accuracy_score(classes, picked))
    assert found["f1"] == pytest.approx(sk.f1_score(classes, picked, average="macro", zero_division=0))
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(classes, picked))
    assert found["f1_weighted"] == pytest.approx(sk.f1_score(classes, picked, average="weighted", zero_division=0))
    assert found["f2"] == pytest.approx(sk.fbeta_score(classes, picked, beta=2, average="macro", zero_division=0))
    assert found["cohen_kappa"] == pytest.approx(sk.cohen_kappa_score(classes, picked), abs=1e-6)
    rows = random.random((200, 4)) < 0.3
    found = measure(make_metrics(4, multi_label=True, metric="val/auroc"), scores, rows)
    assert found.keys() == {"accuracy", "f1", "f1_micro", "average_precision", "auroc"}
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(rows, scores >= 0.5))
    for name, average in (("f1", "macro"), ("f1_micro", "micro")):
        assert found[name] == pytest.approx(sk.f1_score(rows, scores >= 0.5, average=average))
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(rows, scores, average="macro"))
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(rows, scores, average="macro"))


def test_classes_without_samples_are_left_out_of_means(recwarn):
    """The values are those of scikit-learn on the classes that are there."""
    random = np.random.default_rng(2)
    named = dict.fromkeys(("precision", "recall", "auroc", "average_precision"), True)
    scores = random.dirichlet([1] * 5, 200)
    classes = random.choice([0, 2, 3], 200)  # 1 is predicted, and never there
    scores[:, 4] = 0  # nor there nor predicted
    found = measure(make_metrics(5, chosen=named), scores, classes)
    there, picked = [0, 2, 3], scores.argmax(1)
    hot = np.eye(5)[classes]
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(hot[:, there], scores[:, there], average="macro"))
    expected = sk.average_precision_score(hot[:, there], scores[:, there], average="macro")
    assert found["average_precision"] == pytest.approx(expected)
    recall = sk.recall_score(classes, picked, labels=there, average="macro")
    assert found["recall"] == pytest.approx(recall) == found["balanced_accuracy"]
    assert found["f1"] == pytest.approx(sk.f1_score(classes, picked, average="macro"))
    assert found["precision"] == pytest.approx(sk.precision_score(classes, picked, average="macro", zero_division=0))

    rows, scores = random.random((200, 6)) < 0.3, random.random((200, 6))
    rows[:, 1] = rows[:, 4] = False  # 1 is given, and 4 is not
    scores[:, 4] = 0
    rows[:, 5] = True  # without a curve against the rest
    there = [0, 2, 3, 5]
    found = measure(make_metrics(6, multi_label=True, chosen=named), scores, rows)
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(rows[:, there[:3]], scores[:, there[:3]], average="macro"))
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(rows[:, there], scores[:, there]))
    assert found["recall"] == pytest.approx(sk.recall_score(rows[:, there], scores[:, there] >= 0.5, average="macro"))
    f1 = sk.f1_score(rows, scores >= 0.5, average="macro", zero_division=np.nan)
    assert found["f1"] == pytest.approx(f1)
    counted = [0, 1, 2, 3, 5]
    precision = sk.precision_score(rows[:, counted], scores[:, counted] >= 0.5, average="macro")
    assert found["precision"] == pytest.approx(precision)
    assert not [one for one in recwarn if "positive samples" in str(one.message)]


def measure_half(rank: int, store: Path) -> None:
    """In one of two processes: it adds its half of the samples; the value is that of all of them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    scores = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    rows = (scores + torch.rand(40, 4, generator=torch.Generator().manual_seed(1)) > 1.2).long()
    rows[20:, 0] = rows[:, 3] = 0  # the second process has no sample of the first label, and none has one of the last
    named = dict.fromkeys(("precision", "recall", "auroc"), True)
    metrics = make_metrics(4, multi_label=True, chosen=named)
    share = slice(20 * rank, 20 * rank + 20)
    update_metrics(metrics, scores[share], decide(scores[share], None, multi_label=True), rows[share])
    there = rows[:, :3].numpy(), scores[:, :3].numpy()
    picked = there[1] >= 0.5
    assert float(metrics["average_precision"].compute()) == pytest.approx(sk.average_precision_score(*there))
    assert float(metrics["auroc"].compute()) == pytest.approx(sk.roc_auc_score(*there))
    assert float(metrics["recall"].compute()) == pytest.approx(sk.recall_score(there[0], picked, average="macro"))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_means_are_of_the_classes_of_all_processes(tmp_path):
    store = tmp_path / "store"
    halves = [start_fork([], tmp_path, run=partial(measure_half, rank, store)) for rank in range(2)]
    told = [one.communicate() for one in halves]
    assert [one.returncode for one in halves] == [0, 0], told


def measure(metrics: Any, scores: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """The values of metrics after two batches, and an empty one."""
    for part in (slice(0, 120), slice(120, 200), slice(200, None)):
        probabilities, targets = torch.tensor(scores[part]).float(), torch.tensor(wanted[part]).long()
        decisions = decide(probabilities, None, multi_label=wanted.ndim == 2)
        update_metrics(metrics, probabilities, decisions, targets)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


TABLES = {
    "file_name,tag\na.png,x\n": "no column 'label'; it has 'file_name', 'tag'",
    "file_name,label\na.png,x\na.png,y\n": "line 3: 'a.png' is in line 2 already",
    "file_name,label\na.png,x\nb.png,x,y\n": "line 3: 3 cells under a header of 2",
    "file_name,label\na.png,x\n./a.png,y\n": "line 3: './a.png' is in line 2 already",
    "file_name,label\na.png,x\nb.png,\n": "line 3: no label in column 'label'",
    "file_name;label\na.png;x\n": "no column 'file_name'; it has 'file_name;label'",
    "file_name,label\na.png,x\n": "leaves a split empty",
}


@pytest.mark.parametrize("text", TABLES)
def test_a_table_that_cannot_be_read_is_told_with_its_line(text, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(TABLES[text])):
        image_data(name="table", source="csv", img_size=8, root=str(tmp_path / "a.csv")).setup()


@pytest.mark.parametrize("cells", [",1", "0, "])
def test_an_empty_flag_is_not_taken_for_an_absent_label(cells, tmp_path):
    (tmp_path / "all.csv").write_text(f"file_name,odd,first\na.png,1,0\nb.png,{cells}\n")
    column = "odd" if cells.startswith(",") else "first"
    keys = {"source": "csv", "img_size": 8, "root": str(tmp_path / "all.csv"), "multi_label": True}
    with pytest.raises(ValueError, match=rf"all\.csv, line 3: .* in column '{column}', which holds 1 or 0") as error:
        image_data(name="table", **keys, label_column=["odd", "first"]).setup()
    assert "\n" not in str(error.value)


def test_columns_of_flags_are_labels_in_the_order_that_was_given(tmp_path):
    write_digits(tmp_path, "", range(40))
    lines = [f"{i}.png,{i % 2},{int(i < 4)}" for i in range(40)]
    (tmp_path / "all.csv").write_text("\n".join(["file_name,odd,first", *lines]))
    data = image_data(
        name="table",
        source="csv",
        img_size=8,
        in_chans=1,
        root=str(tmp_path / "all.csv"),
        multi_label=True,
        label_column=["odd", "first"],
        class_weights="balanced",
        val_fraction=0.25,
    )
    data.setup()
    assert data.info.class_names == ["odd", "first"]
    assert data.info.sizes == {"train": 31, "val": 9, "test": 9}
    _, targets = next(iter(data.val_dataloader()))
    held = torch.cat([targets for _, targets in data.val_dataloader()])
    assert targets.dtype == torch.float32
    assert held.shape == (9, 2)
    odd, first = held.sum(0).tolist()
    assert first == 1  # of the rarest label, too, a quarter validates
    assert data.info.class_weights == pytest.approx([(11 + odd) / (20 - odd), 28 / 3])
