"""Classifiers of documents through the commands: a run, evaluation, the linear model."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from documents import make_rows, write_jsonl

WORDS = (
    "task=document",
    "data=documents",
    "data.root=rows.jsonl",
    "data.cache=cache",
    "data.validation=0.2",
    "data.test=0.2",
    "mixer=linear_attention",
    "model.d_model=16",
    "model.depth=1",
    "recipe.batch_size=1024",
    "recipe.epochs=2",
    "recipe.schedule.warmup_updates=0",
    "trainer=cpu",
)


@pytest.fixture
def folder(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", make_rows(90))
    return tmp_path


@pytest.mark.slow
def test_a_run_is_measured_again(folder, command_here):
    two = [row for row in make_rows(200) if row["label"] != "tree"]
    write_jsonl(folder / "rows.jsonl", two[:90])
    chosen = (
        "task.metric=balanced_accuracy",
        "+task.metrics.auroc=true",
        "task.threshold=f1",
        "data.sampling=balanced",
    )
    whole = command_here(folder, "train", *WORDS, *chosen, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr
    metrics = json.loads((folder / "whole" / "metrics.json").read_text())
    assert metrics["test/linear_accuracy"] > 0.9, "the words of a document tell its class"
    assert f"{metrics['test/linear_accuracy']:.4f} by TF-IDF" in whole.stdout
    assert sum(metrics["test/documents_by_length"].values()) == 18
    assert torch.tensor(metrics["test/confusion_matrix"]).sum() == 18
    assert metrics["updates"] > 4
    assert {"val/balanced_accuracy", "test/auroc", "val/per_class", "val/confusion_matrix"} <= metrics.keys()
    ((name, threshold),) = metrics["thresholds"].items()
    for split in ("val", "test"):
        rows = list(csv.reader((folder / "whole" / f"confusion_matrix_{split}.csv").open()))
        assert [[int(cell) for cell in row[1:]] for row in rows[1:]] == metrics[f"{split}/confusion_matrix"]
        rows = list(csv.DictReader((folder / "whole" / f"classes_{split}.csv").open()))
        assert [row["class"] for row in rows] == rows_of(metrics[f"{split}/per_class"], "class") == ["bird", name]

    checkpoint = f"checkpoint={folder / 'whole' / 'checkpoints' / 'best.ckpt'}"
    measured = command_here(folder, "evaluate", checkpoint, "trainer=cpu", "output=m.json")
    assert measured.returncode == 0, measured.stderr
    found = json.loads((folder / "m.json").read_text())
    assert found["test/documents"] == 18
    assert found["test/accuracy"] == pytest.approx(metrics["test/accuracy"])
    assert found["test/per_class"] == metrics["test/per_class"]
    assert found["thresholds"] == metrics["thresholds"]
    assert "have changed" not in measured.stderr
    write_jsonl(folder / "rows.jsonl", [{**row, "text": f"{row['text']} more"} for row in two[:90]])
    changed = command_here(folder, "evaluate", checkpoint, "trainer=cpu", "output=m.json")
    assert "test has other texts or labels than when the model was trained, and as many samples" in changed.stderr
    predicted = command_here(folder, "predict", "checkpoint=whole/model", "input=rows.jsonl", "output=p.csv")
    assert predicted.returncode == 0, predicted.stderr
    for row in csv.DictReader((folder / "p.csv").open()):
        second = float(row["probability_1"] if row["class_1"] == name else row["probability_2"])
        if abs(second - threshold) > 1e-5:
            assert row["decision"] == (name if second > threshold else "bird")


@pytest.mark.slow
def test_predicted_labels_are_divided_as_those_of_the_training(tmp_path, command_here):
    kinds = [("bird", "tree"), ("tree",), ("bird; small", "tree"), ("bird",), ("bird; small",)]
    rows = [{"text": f"{' '.join(kinds[i % 5] * 3)} {i}", "label": "|".join(kinds[i % 5])} for i in range(100)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    words = (*WORDS[:6], "data.multi_label=true", "data.label_delimiter='|'", "model=linear", "trainer=cpu")
    trained = command_here(tmp_path, "train", *words, "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stderr
    checkpoint = "checkpoint=run/checkpoints/best.ckpt"
    predicted = command_here(tmp_path, "predict", checkpoint, "input=rows.jsonl", "output=p.csv")
    assert predicted.returncode == 0, predicted.stderr
    assert "stands between labels" not in predicted.stderr
    found = [row["decision"] for row in csv.DictReader((tmp_path / "p.csv").open())]
    wanted = ["|".join(sorted(row["label"].split("|"))) for row in rows]
    assert sum(one == other for one, other in zip(found, wanted, strict=True)) > 90


@pytest.mark.slow
def test_two_processes_measure_as_one_and_the_linear_model_beside_them(folder, command, command_here):
    """21 test documents; only the first process fits the linear model."""
    words = [word for word in WORDS if word != "trainer=cpu"]
    result = command(
        folder, "train", *words, "data.test=0.24", "recipe.batch_size=2048", "trainer=ddp_sim", "output=run"
    )
    assert result.returncode == 0, result.stderr
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert metrics["test/linear_accuracy"] > 0.9
    alone = command_here(folder, "evaluate", "checkpoint=run/checkpoints/best.ckpt", "trainer=cpu")
    assert alone.returncode == 0, alone.stderr
    found = json.loads((folder / "run" / "evaluation_test.json").read_text())
    assert found["test/documents"] == 21
    for name in ("loss", "accuracy", "f1_macro", "calibration_error"):
        assert metrics[f"test/{name}"] == pytest.approx(found[f"test/{name}"]), name
    assert metrics["test/confusion_matrix"] == found["test/confusion_matrix"]


PLUGIN = """
import json
from longseq.tasks.document.sources import Opened, Reader, Sample, Source, register
from longseq.tasks.text.documents import Place

def shout(text):
    return text.upper()

def read(keys):
    for number, line in enumerate(open(keys.root)):
        row = json.loads(line)
        yield Sample(shout(row["text"]), (row["label"],), Place(keys.root, row=number))

def find(keys):
    return Opened({"train": lambda: Reader(lambda: read(keys), stamp=[1])})

register("shout", Source(find, reads=("root", "tokenizer", "separator", "validation", "test"), prepare=shout))
"""


@pytest.mark.slow
def test_a_folder_of_a_source_of_a_plug_in_needs_the_plug_in(folder, command):
    (folder / "my_documents.py").write_text(PLUGIN)
    words = ("plugins=[my_documents]", "data.source=shout", "recipe.epochs=1", "callbacks.linear=null", "output=run")
    trained = command(folder, "train", *WORDS, *words)
    assert trained.returncode == 0, trained.stderr
    card = (folder / "run" / "model" / "README.md").read_text()
    assert "prepared as `data.source=shout` does" in card
    assert "my_documents.shout" in card
    reading = ("predict", "checkpoint=run/model", "input=rows.jsonl")
    declared = command(folder, *reading, "plugins=[my_documents]")
    assert declared.returncode == 0, declared.stderr
    exporting = ("export", "checkpoint=run/model", "output=model.pt", "latency=false", "plugins=[my_documents]")
    exported = command(folder, *exporting)
    assert exported.returncode == 0, exported.stderr
    told = "warning: texts must be prepared as data.source=shout does before they are given to the file"
    assert f"{told}: my_documents.shout" in exported.stdout
    refused = command(folder, *reading)
    assert refused.returncode != 0
    assert "checkpoint=run/model needs the plug-in my_documents, which nothing declares" in refused.stderr


def rows_of(rows, key):
    return [row[key] for row in rows]


@pytest.mark.slow
def test_the_linear_model_trains_evaluates_and_predicts(folder, command_here):
    # An experiment may hold keys of model=document, and a batch less than the longest document.
    words = (*WORDS[:6], "model=linear", "+model.depth=1", "recipe.batch_size=8", "trainer=cpu")
    words += ("recipe.ema={decay: 0.9}",)
    trained = command_here(folder, "train", *words, "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stderr
    assert "learning rate" not in trained.stdout
    assert "batch" not in trained.stdout
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert metrics["test/accuracy"] > 0.9
    assert "test/linear_accuracy" not in metrics
    assert (metrics["epochs"], metrics["updates"]) == (1, 1)
    for source in ("run/checkpoints/best.ckpt", "run/model"):
        words = (f"checkpoint={source}", "data.test=rows.jsonl", "data.cache=cache", "trainer=cpu", "output=m.json")
        measured = command_here(folder, "evaluate", *words)
        assert measured.returncode == 0, measured.stderr
        assert json.loads((folder / "m.json").read_text())["test/documents"] == 90
    predicted = command_here(folder, "predict", "checkpoint=run/model", "input=rows.jsonl", "output=p.csv")
    assert predicted.returncode == 0, predicted.stderr
    assert len((folder / "p.csv").read_text().splitlines()) == 91
    described = command_here(folder, "describe", "checkpoint=run/model")
    assert "LinearTextClassifier" in described.stdout, described.stderr
