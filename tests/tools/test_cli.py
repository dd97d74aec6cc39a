"""The console script: what it says of itself, and one line for a mistake."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from longseq.tools import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["longseq", *arguments])
    try:
        return cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_alone_it_explains_itself(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 0
    output = capsys.readouterr().out
    for name in cli.VERBS:
        assert f"  {name} " in output
    assert "longseq train mixer=" in output


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.split() == ["longseq", importlib.metadata.version("longseq")]


@pytest.mark.parametrize("verb", cli.VERBS.values(), ids=cli.VERBS)
def test_every_verb_has_its_command(verb):
    assert callable(importlib.import_module(verb.module).run)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("learn",), ["unknown verb 'learn'", "train, evaluate"]),
        (("benchmark", "ops=[delta_rule]"), ["unknown verb 'benchmark'", "benchmark kernels, benchmark models"]),
        (("benchmark", "tune", "op=sum"), ["longseq: error: "]),
        (("train", "mixer=longhron"), ["mixer/longhron", "deltanet", "longhorn"]),
        (("train", "mixer=hybrid", "mixer.name=[1,2]"), ["error: mixer=[1, 2] is no pattern: write a name"]),
        (("train", "colour=red"), ["colour"]),
        (("train", "recipe=zoology"), ["recipe=zoology belongs to task=probe: add task=probe; for task=image, give"]),
        (("train", "data=mqar"), ["data=mqar belongs to task=probe: add task=probe; for task=image, give data=cifar"]),
        (("train", "task=probe", "recipe=vim"), ["recipe=vim belongs to task=image: add task=image; for task=probe"]),
        (("train", "model=token"), ["model=token belongs to task=probe: add task=probe; for task=image, give model="]),
        (("describe", "data=mqar"), ["data=mqar belongs to task=probe: add task=probe"]),
        (("train", "mixer.name=longhron"), ["did you mean 'longhorn'?"]),
        (("train", "data=cifar10", "data.root=/nowhere"), ["/nowhere", "data.download=true"]),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("longseq: error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.slow
def test_the_installed_script_helps_with_a_verb():
    script = Path(sys.executable).with_name("longseq")
    result = subprocess.run([script, "train", "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for word in ("longseq train mixer=deltanet", "mixer:", "resume=true"):
        assert word in result.stdout


@pytest.mark.slow
def test_one_bad_trial_does_not_end_a_sweep(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    sweep = ("train", "-m", "recipe.batch_size=100000,32", "trainer.fast_dev_run=true", "model.depth=1")
    assert run(monkeypatch, *sweep) == 2
    captured = capsys.readouterr()
    assert "recipe.batch_size=100000" in captured.err
    assert "test/top1" in captured.out
