"""The console script: its texts, and one line for a mistake."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import logging
import re
import subprocess
import sys
import warnings
from importlib import resources
from typing import get_type_hints

import pytest

from longseq.tools import cli, key_help

KEYS_OF = re.compile(r"\$\{keys_of:(\w+)\}")


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


@pytest.mark.parametrize("arguments", [("benchmark",), ("benchmark", "--help")])
def test_the_first_word_of_two_explains_the_second(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 0
    output = capsys.readouterr().out
    for name in cli.VERBS:
        if name.startswith("benchmark "):
            assert f"\n  {name.removeprefix('benchmark ')} " in output


def test_stopped_by_hand_it_says_so_in_a_word(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run_verb", interrupted)
    assert run(monkeypatch, "prepare") == 130
    assert capsys.readouterr().err == "longseq: interrupted\n"


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.split() == ["longseq", importlib.metadata.version("longseq")]


@pytest.mark.parametrize("argument", ["", "--help", "--version"])
def test_an_answer_about_the_command_imports_no_large_library(argument):
    code = (
        "import sys; from longseq.tools import cli; sys.argv[1:] = sys.argv[1].split(); cli.main(); "
        "print({'torch', 'timm', 'hydra', 'lightning', 'numpy'} & sys.modules.keys())"
    )
    process = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "set()"


def test_the_package_answers_before_it_imports_large_libraries():
    code = (
        "import sys, longseq; print(longseq.__version__, 'from_pretrained' in dir(longseq)); "
        "print({'torch', 'timm'} & sys.modules.keys(), hasattr(longseq, 'nothing'), longseq.plugins.loaded())"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version = importlib.metadata.version("longseq")
    assert process.stdout.splitlines() == [f"{version} True", "set() False ()"]


@pytest.mark.parametrize("verb", cli.VERBS.values(), ids=cli.VERBS)
def test_every_verb_has_its_command(verb):
    assert callable(importlib.import_module(verb.module).run)


MISTAKES = [
    ("learn", "unknown verb 'learn': the verbs are train, evaluate"),
    ("trian", "unknown verb 'trian': did you mean 'train'?"),
    ("benchmark ops=[delta_rule]", "`longseq benchmark` is followed by one of kernels, models, tune, compile"),
    ("benchmark tune op=sum", ""),
    ("train mixer=longhron", "mixer=longhron is unknown: did you mean mixer=longhorn? the options of mixer are abc, "),
    ("train data=cifar11", "data=cifar11 is unknown: did you mean data=cifar10?"),
    (
        "train recipe=zoology",
        "recipe=zoology belongs to task=probe: add task=probe; for task=image, give recipe=cifar10, ",
    ),
    ("train data=mqar", "data=mqar belongs to task=probe: add task=probe; for task=image, give data=cifar10, "),
    (
        "train task=probe recipe=vim",
        "recipe=vim belongs to task=image: add task=image; for task=probe, give recipe=mad",
    ),
    (
        "train model=token task=image",
        "model=token belongs to task=probe or task=lm: add task=probe or task=lm; for task=image, give model=timm, ",
    ),
    ("describe data=mqar", "data=mqar belongs to task=probe: add task=probe"),
    ("train data=image_folder data.root=nowhere trainer.accelerator=xla", "the trainer cannot be built: "),
    ("train output=Läufe", "output=Läufe cannot be read: put the value in quotes, \"output='Läufe'\""),
    ("train modle=vim", "modle is unknown: did you mean model? the keys are "),
    ("train colour=red", "colour is unknown: the keys are "),
    ("train +colour=red", "colour is unknown: the keys are "),
    ("train data.img_sise=3 recipe.epoch=3", "data.img_sise is unknown: did you mean data.img_size? the keys of data"),
    (
        "train recipe.ema.decay.first=1",
        "recipe.ema.decay is one value and has no key first: give recipe.ema.decay=VALUE",
    ),
    ("train ~recipe.augment", "recipe.augment=null must be a dictionary of its keys: crop, "),
    ("evaluate checkpoint=x.ckpt splitt=val", "splitt is unknown: did you mean split?"),
    ("predict +colour=red", "colour is unknown"),
    ("evaluate checkpoint=x.ckpt data=FOLDER", "data has no options here: give data.KEY=VALUE, a KEY of name, "),
    ("prepare task=image input=x output=y", "task=image: longseq prepare works for task=lm"),
    ("prepare task=lm input=nowhere output=y", "input=nowhere does not exist"),
    ("harness taks=[piqa]", "taks is unknown: did you mean tasks?"),
    ("train --lr 0.1", "--lr is no flag: keys are written key=value"),
    ("train digits", "'digits' is no override: write key=value"),
    ("train recipe.learning_rate=inf", "recipe.learning_rate=inf must be a number of at least 0"),
    ("train data=cifar10 data.root=/nowhere", "/nowhere"),
    ("predict checkpoint=x.ckpt input=y top_k=0", "top_k=0 must be a whole number of at least 1"),
    ("evaluate checkpoint=x.ckpt split=train", "split=train must be one of test, val"),
    ("export checkpoint=x.ckpt opset=3", "opset=3 must be a whole number from 18 to 26"),
    ("benchmark models text.depth=-1", "text.depth=-1 must be a whole number of at least 1"),
    ("benchmark compile capabilities=[7.0]", "each entry one of"),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_one_line(monkeypatch, capsys, tmp_path, command, words):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *command.split()) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("longseq: error: ")
    assert words in lines[0]
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.slow
def test_a_verb_helps(monkeypatch, capsys):
    assert run(monkeypatch, "train", "--help") == 0
    output = capsys.readouterr().out
    for word in ("longseq train mixer=deltanet", "mixer:", "resume=true", "seed=0  ", "output=${hydra"):
        assert word in output


@pytest.mark.parametrize(
    ("verb", "lines"),
    [
        ("train", ["seed=0", "init=null"]),
        ("evaluate", ["checkpoint=null", "split=test", "data.img_size=null", "data.validation=null"]),
        ("predict", ["checkpoint=null", "top_k=5", "device=auto"]),
        ("prepare", ["input=null", "validation=0.01", "test=0.01"]),
        ("generate", ["checkpoint=null", "temperature=1.0", "save_state=null"]),
        ("harness", ["checkpoint=null", "tasks=null", "data.root=null", "limit=null"]),
    ],
)
def test_the_help_tells_each_key_with_its_meaning_and_type(verb, lines):
    told = dict(line.split(maxsplit=1) for line in key_help.describe_keys(verb).splitlines())
    assert set(lines) <= told.keys()
    module, _, name = key_help.KEYS[verb].rpartition(".")
    hints = get_type_hints(getattr(importlib.import_module(module), name))
    groups = {key for key, hint in hints.items() if "Mapping" in str(hint)}
    assert {line.partition("=")[0].partition(".")[0] for line in told} | groups == hints.keys()
    assert all(len(words) > 8 for words in told.values()), "each has words of its own"


def test_a_verb_whose_help_lists_its_keys_has_them():
    files = resources.files("longseq.conf").iterdir()
    listed = {match[1] for file in files if file.is_file() and (match := KEYS_OF.search(file.read_text("utf-8")))}
    assert listed == set(key_help.KEYS)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "runs"), "runs: is a directory"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), "runs/a: permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: make room first"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), "runs/a: the disk is full: make room first"),
    ],
)
def test_a_file_that_the_system_refuses_is_one_line(monkeypatch, capsys, error, told):
    def refuse(name, overrides):
        raise error

    monkeypatch.setattr(cli, "_run_verb", refuse)
    assert run(monkeypatch, "train") == 2
    assert capsys.readouterr().err == f"longseq: error: {told}\n"


def test_the_help_names_what_a_key_takes():
    told = key_help.describe_keys("predict").splitlines()
    (top_k,) = (line for line in told if line.startswith("top_k=5 "))
    assert top_k.endswith("classes that are written for each image; a whole number of at least 1")
    (checkpoint,) = (line for line in told if line.startswith("checkpoint=null "))
    assert checkpoint.endswith("; text, needed")


@pytest.mark.slow
def test_one_bad_trial_does_not_end_a_sweep(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    sweep = ("train", "-m", "recipe.batch_size=100000,32", "trainer.fast_dev_run=true", "model.depth=1")
    assert run(monkeypatch, *sweep) == 2
    captured = capsys.readouterr()
    assert "recipe.batch_size=100000" in captured.err
    assert "test/top1" in captured.out


@pytest.mark.slow
def test_a_command_leaves_logging_and_warnings_as_they_were(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    importlib.import_module(cli.VERBS["train"].module)  # what it imports sets levels, too
    mine = logging.getLogger("somebody.else")
    handler = logging.FileHandler(tmp_path / "mine.txt", mode="w")
    logging.root.addHandler(handler)
    try:
        before = logging_and_warnings()
        training = ("train", "trainer=cpu", "model.embed_dim=16", "model.depth=1", "trainer.fast_dev_run=true")
        assert run(monkeypatch, *training) == 0
        assert logging_and_warnings() == before
        assert run(monkeypatch, *training, "recipe.batch_size=100000") == 2
        assert logging_and_warnings() == before
        mine.warning("I am heard")
        assert "I am heard" in (tmp_path / "mine.txt").read_text()
    finally:
        logging.root.removeHandler(handler)
        handler.close()


def logging_and_warnings() -> tuple[object, ...]:
    loggers = {"": logging.root} | logging.root.manager.loggerDict
    kept = {
        name: (logger.level, logger.disabled, logger.propagate, tuple(logger.handlers))
        for name, logger in loggers.items()
        if isinstance(logger, logging.Logger) and (logger.level or logger.disabled or logger.handlers)
    }
    return kept, logging.root.manager.disable, tuple(warnings.filters)
