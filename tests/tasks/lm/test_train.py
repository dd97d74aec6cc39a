"""Runs of `longseq train task=lm`: what they report, interruptions, another end, Muon, and a sharded model."""

from __future__ import annotations

import email
import html
import http
import json
import random
import shutil
import unittest
import urllib
import wsgiref
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.optim import param_groups_weight_decay

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import evaluate, generate, train
from longseq.tasks.lm import data as lm_data
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.training.muon import create_muon
from longseq.tools.hugging_face.conversion import read_model, write_model

# So many that no split is empty, whatever these files hold in a version of Python: each goes into one as a whole.
FILES = [
    str(path)
    for package in (email, html, http, json, unittest, urllib, wsgiref)
    for path in sorted(Path(package.__file__).parent.glob("*.py"))
    if path.stat().st_size < 20_000
]
WORDS = (
    "task=lm",
    "trainer=cpu",
    "mixer=linear_attention",
    "data.window=16",
    "data.validation=0.2",
    "data.test=0.2",
    "model.d_model=16",
    "model.depth=1",
    "recipe.batch_size=64",
    "recipe.updates=8",
    "recipe.validate_every_updates=3",
    "recipe.schedule.warmup_updates=2",
    "trainer.log_every_n_steps=1",
    "+trainer.limit_val_batches=3",
    "+trainer.limit_test_batches=3",
    "callbacks.checkpoint.every_n_train_steps=1",
)


class Interruption(Exception):
    pass


@pytest.fixture(autouse=True)
def few_files(monkeypatch, tmp_path):
    """Few files in place of the whole standard library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lm_data, "standard_library_files", lambda: FILES)


@pytest.fixture
def run(compose_config, tmp_path, monkeypatch):
    """run(NAME, *overrides, stop=None): train in tmp_path/NAME, up to the middle of an update; gives the folder."""

    def go(name, *overrides, stop=None):
        whole = LanguageModelTask.training_step

        def step(self, batch, batch_idx):
            if self.global_step == stop and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
                raise Interruption
            return whole(self, batch, batch_idx)

        with monkeypatch.context() as patch:
            patch.setattr(LanguageModelTask, "training_step", step)
            config = compose_config("train", *WORDS, *overrides, f"output={tmp_path / name}")
            if stop is None:
                train.run(config)
            else:
                with pytest.raises(Interruption):
                    train.run(config)
        return tmp_path / name

    return go


def last(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def assert_same_run(one, other):
    first, second = last(one), last(other)
    assert first["global_step"] == second["global_step"]
    differing = [
        name for name, value in first["state_dict"].items() if not torch.equal(value, second["state_dict"][name])
    ]
    assert not differing


PACKINGS = {
    "packed": ("data.reset_state=true", "trainer.accumulate_grad_batches=2"),
    "documents": ("data.packing=documents", "data.reset_state=true"),
    "streams": ("data.packing=streams", "data.reset_state=true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_that_is_interrupted_anywhere_ends_as_one_that_is_not(packing, run):
    words = (*PACKINGS[packing], "mixer=gated_deltanet")
    whole = run("whole", *words)
    cut = run("cut", *words, stop=random.Random(packing).randrange(1, 8))
    run("cut", *words, "resume=true")
    assert_same_run(whole, cut)


@pytest.mark.slow
def test_a_run_with_a_constant_rate_ends_elsewhere_from_its_checkpoint(run, tmp_path):
    decay = "recipe.schedule.decay_epochs=0.5"
    run("long", decay, "recipe.updates=30", stop=4)
    branch = shutil.copy(tmp_path / "long" / "checkpoints" / "last.ckpt", tmp_path / "branch.ckpt")
    short = run("short", decay)
    leg = run("leg", decay, f"resume={branch}")
    assert_same_run(short, leg)
    with pytest.raises(ValueError, match="before update 5"):
        run("later", decay, "recipe.updates=30", f"resume={short / 'checkpoints' / 'last.ckpt'}")
    with pytest.raises(ValueError, match=r"recipe\.learning_rate"):
        run("other", decay, "recipe.updates=30", "recipe.learning_rate=1", f"resume={branch}")


def make_model():
    torch.manual_seed(0)
    return TokenBackbone(vocab_size=11, d_model=16, depth=1, mixer="gated_deltanet")


def descend(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        features, _ = model.forward_features(torch.arange(10)[None])
        model.summed_loss(features, torch.arange(1, 11)[None]).objective.backward()
        optimizer.step()


def test_muon_is_for_hidden_matrices_and_adamw_for_the_rest():
    first, model, other = make_model(), make_model(), make_model()
    optimizer = create_muon(model, lr=0.01, weight_decay=10.0)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {named[id(p)] for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    assert {name.rsplit(".", 2)[-2] for name in chosen} == {"in_proj", "out_proj", "fc1_g", "fc1_x", "fc2"}
    decayed = {named[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not decayed & model.no_weight_decay()
    assert chosen < decayed
    everything = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(everything) == sorted(named)
    twins = dict(other.named_parameters())
    hidden = [twins[name] for name in chosen]
    taken = set(map(id, hidden))
    groups = [
        {**group, "params": [p for p in group["params"] if id(p) not in taken]}
        for group in param_groups_weight_decay(other, 10.0, no_weight_decay_list=other.no_weight_decay())
    ]
    parts = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=10.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)),
    ]

    class Both:
        def zero_grad(self):
            other.zero_grad()

        def step(self):
            for part in parts:
                part.step()

    descend(model, optimizer)
    descend(other, Both())
    found, before = dict(model.named_parameters()), dict(first.named_parameters())
    for name, value in other.named_parameters():
        if name in chosen:  # processors with instructions for bfloat16 sum in another order before they round
            assert (found[name] - value).norm() < 0.02 * (value - before[name]).norm(), name
        else:
            torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


PLUGIN = f"""
from longseq.tasks.lm import data as lm_data
lm_data.standard_library_files = lambda: {FILES}
"""

ADAMW = ("recipe=lm", "recipe.tokens=null", "recipe.schedule.warmup_tokens=null", "recipe.learning_rate=0.01")


@pytest.mark.slow
def test_a_sharded_run_on_two_processes_goes_on_as_one_process_would(run, command, tmp_path):
    whole = run("whole", *ADAMW)
    run("cut", *ADAMW, stop=4)
    (tmp_path / "few_files.py").write_text(PLUGIN)
    words = [word for word in WORDS if word != "trainer=cpu"]
    sharded = ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.devices=2")
    words += [*ADAMW, *sharded, "plugins=[few_files]", "resume=true", "hydra.run.dir=cut"]
    done = command(tmp_path, "train", *words)
    assert done.returncode == 0, done.stderr
    first, second = last(whole), last(tmp_path / "cut")
    assert second["global_step"] == 8
    for name, value in first["state_dict"].items():
        torch.testing.assert_close(second["state_dict"][name], value, rtol=1e-3, atol=1e-5)
    assert json.loads((tmp_path / "cut" / "metrics.json").read_text())["updates"] == 8


@pytest.mark.slow
def test_a_run_reports_its_metrics(run):
    folder = run("whole")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert 1 < metrics["test/bits_per_byte"] < 9
    assert metrics["test/perplexity"] == pytest.approx(2.718281828 ** metrics["test/loss"], rel=1e-4)
    assert sum(row["tokens"] for row in metrics["test/perplexity_by_position"]) == 3 * 64
    events = EventAccumulator(str(folder)).Reload()
    charts = {"train/loss", "train/lr", "val/bits_per_byte", "throughput/tokens_per_second", "train/gradient_norm"}
    assert charts <= set(events.Tags()["scalars"])
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    losses = {event.step: event.value for event in events.Scalars("val/loss")}
    assert losses[best["global_step"] - 1] == min(losses.values())


@pytest.mark.slow
def test_a_checkpoint_is_measured_again_and_writes_text(run, compose_config, tmp_path, capsys):
    folder = run("whole")
    checkpoint, saved = (f"checkpoint={folder / name}" for name in ("checkpoints/best.ckpt", "model"))
    limits = ("+trainer.limit_test_batches=3", "trainer=cpu", "data.eval_batch_size=4")
    text = ("data.source=standard_library", "data.validation=0.2", "data.test=0.2", "data.reset_state=false")
    metrics = json.loads((folder / "metrics.json").read_text())
    for words in ((checkpoint, *limits), (saved, *limits, *text)):
        found = evaluate.run(compose_config("evaluate", *words))
        assert found["test/bits_per_byte"] == pytest.approx(metrics["test/bits_per_byte"], rel=1e-6)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import "}\n{"prompt": "é"}\n')
    files = (f"input={tmp_path / 'prompts.jsonl'}", f"output={tmp_path / 'texts.jsonl'}")
    options = ("max_new_tokens=8", "device=cpu", "end=false")
    generate.run(compose_config("generate", checkpoint, *files, *options))
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["tokens"]) for row in rows] == [("import ", 8), ("é", 8)]
    capsys.readouterr()
    generate.run(compose_config("generate", saved, "prompt='import '", *options))
    assert capsys.readouterr().out == f"import {rows[0]['text']}\n"

    write_model(read_model(folder / "checkpoints" / "best.ckpt"), tmp_path / "converted")
    for path in (folder / "model").glob("*.json"):
        assert json.loads((tmp_path / "converted" / path.name).read_text()) == json.loads(path.read_text())
