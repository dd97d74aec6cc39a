"""Classifiers of documents through the commands: a run, evaluation, the linear model."""

from __future__ import annotations

import csv
import json

import pytest
import torch
import yaml
from documents import make_rows, write_jsonl

WORDS = (
    "task=document",
    "data=documents",
    "data.root=rows.jsonl",
    "data.cache=cache",
    "data.tokenizer=bytes",
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
    assert sum(metrics["test/documents_by_length"].values()) == 18
    texts = [len(row["text"]) + 1 for row in two[:90]]  # bytes and the separator
    assert set(metrics["test/length_quartiles"]) <= set(texts)
    assert torch.tensor(metrics["test/confusion_matrix"]).sum() == 18
    assert metrics["updates"] > 4
    assert {"val/balanced_accuracy", "test/auroc"} <= metrics.keys()
    ((name, threshold),) = metrics["thresholds"].items()
    assert rows_of(metrics["test/per_class"], "class") == ["bird", name]

    checkpoint = f"checkpoint={folder / 'whole' / 'checkpoints' / 'best.ckpt'}"
    measured = command_here(folder, "evaluate", checkpoint, "trainer=cpu", "output=m.json")
    assert measured.returncode == 0, measured.stderr
    found = json.loads((folder / "m.json").read_text())
    assert found["test/documents"] == 18
    assert found["test/accuracy"] == pytest.approx(metrics["test/accuracy"])
    assert found["test/per_class"] == metrics["test/per_class"]
    assert found["thresholds"] == metrics["thresholds"]
    predicted = command_here(folder, "predict", "checkpoint=whole/model", "input=rows.jsonl", "output=p.csv")
    assert predicted.returncode == 0, predicted.stderr
    for row in csv.DictReader((folder / "p.csv").open()):
        second = float(row["probability_1"] if row["class_1"] == name else row["probability_2"])
        if abs(second - threshold) > 1e-5:
            assert row["decision"] == (name if second > threshold else "bird")


def rows_of(rows, key):
    return [row[key] for row in rows]


@pytest.mark.slow
def test_the_linear_model_trains_evaluates_and_predicts(folder, command_here):
    # An experiment may hold keys of model=document, and a batch less than the longest document.
    words = (*WORDS[:7], "model=linear", "+model.depth=1", "recipe.batch_size=8", "trainer=cpu")
    words += ("recipe.ema={decay: 0.9}",)
    trained = command_here(folder, "train", *words, "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stderr
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert metrics["test/accuracy"] > 0.9
    assert (metrics["epochs"], metrics["updates"]) == (1, 1)
    for source in ("run/checkpoints/best.ckpt", "run/model"):
        words = (f"checkpoint={source}", "data.test=rows.jsonl", "data.cache=cache", "trainer=cpu", "output=m.json")
        measured = command_here(folder, "evaluate", *words)
        assert measured.returncode == 0, measured.stderr
        assert json.loads((folder / "m.json").read_text())["test/documents"] == 90
    predicted = command_here(folder, "predict", "checkpoint=run/model", "input=rows.jsonl", "output=p.csv")
    assert predicted.returncode == 0, predicted.stderr
    assert len((folder / "p.csv").read_text().splitlines()) == 91


@pytest.mark.slow
def test_a_run_chooses_how_it_reads_documents_of_any_length(folder, command_here):
    rows = make_rows(60)
    rows[0]["text"] *= 300
    write_jsonl(folder / "rows.jsonl", rows)
    words = (*WORDS[:4], "data.num_workers=0", "model.ngram_buckets=64", "recipe.epochs=2", "trainer=cpu")
    trained = command_here(folder, "train", *words, "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.startswith("recipe documents for 48 documents")
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    read = {key: config["data"][key] for key in ("tokenizer", "max_length", "truncation", "random_crops")}
    assert read == {"tokenizer": "train:8192", "max_length": 1024, "truncation": "none", "random_crops": True}
    kept = (config["model"]["ngram_buckets"], config["model"]["hashed_ngrams"], config["recipe"]["epochs"])
    assert kept == (64, 3, 2)
    again = command_here(folder, "train", *words, "hydra.run.dir=run", "resume=true")
    assert again.stdout.startswith("this run is finished"), again.stderr
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    measured = command_here(folder, "evaluate", "checkpoint=run/checkpoints/best.ckpt", "trainer=cpu", "output=m.json")
    assert measured.returncode == 0, measured.stderr
    assert json.loads((folder / "m.json").read_text())["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-4)
    predicted = command_here(folder, "predict", "checkpoint=run/model", "input=rows.jsonl", "output=p.csv")
    assert predicted.returncode == 0, predicted.stderr
    assert {row["cut"] for row in csv.DictReader((folder / "p.csv").open())} == {"0"}
