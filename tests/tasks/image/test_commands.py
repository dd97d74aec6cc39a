"""What commands of image training print and write, against what a test computes from `longseq predict`."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from image_data import read_rows, write_digits
from sklearn import metrics as sk
from sklearn.datasets import load_digits

Command = Callable[..., subprocess.CompletedProcess[str]]

TARGET = load_digits().target
SPLITS = {"train": range(150), "val": range(150, 200), "test": range(200, 280)}
BEST = "checkpoint=run/checkpoints/best.ckpt"


@pytest.fixture
def longseq(tmp_path: Path, command_here: Command) -> Callable[..., str]:
    """Runs `longseq` in tmp_path, which must go well; what it prints."""

    def call(*words: str) -> str:
        done = command_here(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="session")
def folder_words(tiny_overrides: tuple[str, ...]) -> tuple[str, ...]:
    """`longseq train` on small images below `data.root=images`, for a training of a second."""
    shape = ("data.img_size=8", "data.crop_pct=1", "data.in_chans=1", "data.num_workers=0")
    return ("train", *tiny_overrides, "data=image_folder", "data.root=images", "recipe=digits", *shape, "output=run")


def read_scores(path: Path, names: Sequence[str]) -> dict[str, list[float]]:
    """The probability of each class that `longseq predict` wrote, by the name of the file."""
    scores = {}
    for row in read_rows(path):
        told = {row[f"class_{i}"]: float(row[f"probability_{i}"]) for i in range(1, len(names) + 1)}
        scores[Path(row["path"]).name] = [told[name] for name in names]
    return scores


@pytest.mark.slow
def test_several_labels_from_columns_of_a_table(longseq, folder_words, tmp_path):
    """The figures of `train` and `evaluate` are scikit-learn's on the probabilities of `predict`."""
    labels = {"even": TARGET % 2 == 0, "small": TARGET < 5, "five": TARGET == 5}
    names = list(labels)
    for split, numbers in SPLITS.items():
        write_digits(tmp_path / "images" / split, "", numbers)
        lines = [[f"{split}/{i}.png", *(int(labels[name][i]) for name in names)] for i in numbers]
        with (tmp_path / "images" / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["file_name", *names], *lines])
    table = ("data.source=csv", "data.multi_label=true", "data.label_column=[even,small,five]")
    own = "+task.metrics.wide={_target_: MultilabelRecall, threshold: 0.3}"
    told = longseq(*folder_words, *table, own, "data.class_weights=balanced", "task.threshold=0.4", "recipe.epochs=6")
    assert "8 px, 3 labels, 150 train, 50 val, 80 test" in told
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    longseq("evaluate", BEST, "trainer=cpu")
    again = json.loads((tmp_path / "run" / "evaluation_test.json").read_text())
    for split in ("val", "test"):
        longseq("predict", BEST, f"input=images/{split}", "output=told.csv")
        scores = read_scores(tmp_path / "told.csv", names)
        found = np.array([scores[f"{i}.png"] for i in SPLITS[split]])
        wanted = np.stack([labels[name][SPLITS[split]] for name in names], 1)
        decided = found >= 0.4
        for row in read_rows(tmp_path / "told.csv"):
            here = decided[SPLITS[split].index(int(Path(row["path"]).stem))]
            assert row["decision"] == ";".join(np.array(names)[here])
        figures = {
            "accuracy": sk.accuracy_score(wanted, decided),
            "f1": sk.f1_score(wanted, decided, average="macro"),
            "f1_micro": sk.f1_score(wanted, decided, average="micro"),
            "average_precision": sk.average_precision_score(wanted, found),
            "wide": sk.recall_score(wanted, found > 0.3, average="macro"),
            "loss": sk.log_loss(wanted.ravel(), found.ravel()),
        }
        for name, value in figures.items():
            assert written[f"{split}/{name}"] == pytest.approx(value, abs=1e-4), name
            if split == "test":
                assert again[f"test/{name}"] == pytest.approx(written[f"test/{name}"])
                assert re.search(rf"^test/{name} +{written[f'test/{name}']:.4f} *$", told, re.MULTILINE), name
    rows = written["test/per_class"]
    assert [row["class"] for row in rows] == names
    values = sk.precision_recall_fscore_support(wanted, decided, zero_division=0)
    for name, column in zip(("precision", "recall", "f1", "images"), values, strict=True):
        assert [float(row[name] or 0) for row in rows] == pytest.approx(list(column), abs=1e-4), name
    matrices = sk.multilabel_confusion_matrix(wanted, decided).tolist()
    assert written["test/confusion_matrix"] == matrices
