"""The console script: its texts, and one line for any error."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from longseq.tasks.commands import COMMANDS
from longseq.tasks.training.configuration import resolve
from longseq.tools import cli, key_help

TINY = (
    *("trainer=cpu", "recipe.epochs=1", "recipe.schedule.warmup_epochs=0", "+trainer.limit_train_batches=1"),
    *("+trainer.limit_val_batches=1", "data.num_workers=0", "logger=none", "model.depth=1", "model.embed_dim=16"),
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["longseq", *arguments])
    try:
        return cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.mark.parametrize("argument", ["", "--help", "--version"])
def test_an_answer_about_the_command_imports_no_large_library(argument):
    code = (
        "import sys; from longseq.tools import cli; sys.argv[1:] = sys.argv[1].split(); cli.main(); "
        "print({'torch', 'timm', 'hydra', 'pydantic', 'lightning', 'numpy'} & sys.modules.keys())"
    )
    process = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trian", "trian is unknown: did you mean train?"),
        ("train mixer=longhron", "mixer=longhron is unknown: did you mean longhorn?"),
        ("train recipe.epoch=5", "recipe.epoch is unknown: did you mean recipe.epochs?"),
        ("train recipe.epochs=0", "recipe.epochs=0: input should be greater than or equal to 1"),
        ("predict", "Missing mandatory value: checkpoint"),
        ("predict checkpoint=x.ckpt input=y", "x.ckpt"),
    ],
)
def test_an_error_is_one_line(monkeypatch, capsys, tmp_path, command, words):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *command.split()) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("longseq: error: ")
    assert words in line
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.slow
def test_the_help_of_a_verb_names_each_key(monkeypatch, capsys):
    assert run(monkeypatch, "train", "--help") == 0
    output = capsys.readouterr().out
    for begin, _ in key_help.rows_of(COMMANDS["train"]):
        assert f"{begin.split('=')[0]}=" in output


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ("{Käse: 2.0, Brot: 1e-3}", {"Käse": 2.0, "Brot": 1e-3}),
        ('{"a=b, c": 2, Brot 2.0: 1}', {"a=b, c": 2, "Brot 2.0": 1}),
    ],
)
def test_names_of_classes_may_have_any_letters(given, table):
    word = cli.quote("train", f"data.class_weights={given}")
    with initialize_config_module("longseq.conf", version_base="1.3"):
        data = resolve(compose("train", ["data=image_folder", word, "output=here"]))["data"]
    assert data["class_weights"] == table


def test_a_prompt_is_the_text_as_it_stands() -> None:
    texts = ["Hello, world", "f(x)", "{", "[1, 2", "true", "123", " ends ", "é #@~%", "a\nb", 'say "hi"', "don't"]
    texts += ["x\\", "${oc.env:HOME}", "\\${x}", "\\\\${x}'"]
    generator = random.Random(0)
    texts += ["".join(generator.choices("a'\"\\${}[](), :=\n;", k=6)) for _ in range(40)]
    for text in texts:
        value = OverridesParser.create().parse_override(cli.quote("generate", f"prompt={text}")).value()
        if text[0] not in "'\"":  # Hydra's own quotes stay
            assert OmegaConf.create({"prompt": value}).prompt == text


def test_a_path_needs_no_quotes_of_its_own(monkeypatch) -> None:
    for path in ("Bücher", "photos (2)", "a=b", "~/photos", "Bücher (2), neu", "50 % {x}"):
        value = OverridesParser.create().parse_override(cli.quote("train", f"data.root={path}")).value()
        assert OmegaConf.create({"root": value}).root == os.path.expanduser(path)
    for kept in ("data.root=[a,b]", "data.root='a b'", "data.root=/a/b-c.tar", "input=${oc.env:HOME}", "mixer=größe"):
        assert cli.quote("train", kept) == kept
    monkeypatch.setenv("HOME", "/home/no one")
    assert cli.quote("train", "output=~/runs") == "output=/home/no one/runs"


@pytest.mark.slow
def test_one_bad_trial_does_not_end_a_sweep(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "train", "-m", "recipe.learning_rate=-1,0.01", "output=sweep", *TINY) == 2
    assert "recipe.learning_rate=-1" in capsys.readouterr().err
    assert [path.parent.name for path in Path("sweep").glob("*/metrics.json")] == ["1_digits_longhorn"]
