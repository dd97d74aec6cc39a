"""The console script: its texts, and one line for a mistake."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import logging
import os
import random
import re
import subprocess
import sys
import warnings
from importlib import resources
from pathlib import Path
from typing import get_type_hints

import configurations
import pytest
from forked import start_fork
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from longseq.tasks.training.configuration import resolve
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


def test_python_runs_the_package_as_the_command():
    command = [sys.executable, "-m", "longseq"]
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["longseq", importlib.metadata.version("longseq")]
    wrong = subprocess.run([*command, "trian"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean 'train'?" in wrong.stderr


@pytest.mark.parametrize("argument", ["", "--help", "--version"])
def test_an_answer_about_the_command_imports_no_large_library(argument):
    code = (
        "import sys; from longseq.tools import cli; sys.argv[1:] = sys.argv[1].split(); cli.main(); "
        "print({'torch', 'timm', 'hydra', 'lightning', 'numpy'} & sys.modules.keys())"
    )
    process = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "set()"


@pytest.mark.slow
def test_the_help_of_a_verb_imports_neither_torch_nor_what_needs_it():
    code = (
        "import sys, configurations; from longseq.tools import cli\n"
        "configurations.share_work()\n"
        "for verb in ('train', 'evaluate', 'prepare', 'prepare image', 'generate', 'harness', 'convert'):\n"
        "    sys.argv[1:] = [*verb.split(), '--help']\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as leaving:\n"
        "        assert not leaving.code\n"
        "print('help ended', {'torch', 'timm', 'lightning', 'torchmetrics', 'torchvision'} & sys.modules.keys())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(configurations.__file__).parent)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "help ended set()"


def test_the_package_answers_before_it_imports_large_libraries():
    code = (
        "import sys, longseq; print(longseq.__version__, 'from_pretrained' in dir(longseq)); "
        "print({'torch', 'timm'} & sys.modules.keys(), hasattr(longseq, 'nothing'), longseq.plugins.loaded())"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version = importlib.metadata.version("longseq")
    assert process.stdout.splitlines() == [f"{version} True", "set() False ()"]


@pytest.mark.slow
def test_a_plug_in_has_the_metrics_that_commands_do_not_load(tmp_path):
    def use_others() -> None:
        import torchmetrics
        from torchmetrics.functional import bleu_score

        words = (["a cat sat here"], [["a cat sat here"]])
        metric = torchmetrics.BLEUScore()
        assert isinstance(metric, torchmetrics.Metric)
        assert metric(*words) == bleu_score(*words) == torchmetrics.functional.bleu_score(*words) == 1

    process = start_fork([], tmp_path, run=use_others)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


@pytest.mark.parametrize("verb", cli.VERBS.values(), ids=cli.VERBS)
def test_every_verb_has_its_command(verb):
    assert callable(importlib.import_module(verb.module).run)


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ("{Käse: 2.0, Brot: 1e-3}", {"Käse": 2.0, "Brot": 1e-3}),
        ("{Käse:2.0}", {"Käse": 2.0}),
        ("{'Käse': 2.0}", {"Käse": 2.0}),
        ('{"a=b, c": 2, Brot 2.0: 1}', {"a=b, c": 2, "Brot 2.0": 1}),
        ("{plain: 2}", {"plain": 2}),
    ],
)
@pytest.mark.parametrize("key", ["data.class_weights", "data.class_map"])
def test_names_of_classes_may_have_any_letters(key, given, table):
    (word,) = cli.quote_texts("train", [f"{key}={given}"])
    with initialize_config_module("longseq.conf", version_base="1.3"):
        data = resolve(compose("train", ["data=image_folder", word, "output=here"]))["data"]
    assert data[key.partition(".")[2]] == table


MISTAKES = [
    ("learn", "unknown verb 'learn': the verbs are train, evaluate"),
    ("benchmark ops=[delta_rule]", "`longseq benchmark` is followed by one of kernels, models, files, tune, compile"),
    ("train mixer=longhorn+gsa", "names several mixers: give mixer=hybrid mixer.name=longhorn+gsa"),
    ("train mixer=longhron", "mixer=longhron is unknown: did you mean mixer=longhorn? the options of mixer are abc, "),
    ("train --epochs 5", "--epochs is no flag: write recipe.epochs=5"),
    ("train mixer=[gla,mamba]", "mixer=[gla,mamba]: give one name; `longseq compare 'mixers=[gla,mamba]'` trains"),
    ("describe data=digits,cifar10", "data=digits,cifar10: give one name; -m runs the command with each"),
    ("train +epochs=5", "epochs is unknown: did you mean recipe.epochs=5?"),
    ("train ++recipe.lr=3", "recipe.lr is unknown: did you mean recipe.learning_rate=3?"),
    ("train +recipe.epoch=5", "recipe.epoch is unknown: did you mean recipe.epochs?"),
    ("train digits", "'digits' is no override: did you mean data=digits?"),
    ("predict checkpoint=x.ckpt input=y top_k=0", "top_k=0 must be a whole number of at least 1"),
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
def test_commands_begin_in_pythons_whose_parser_takes_texts_alone(monkeypatch, capsys, tmp_path):
    """Python 3.14 refuses a help that is no text. Hydra has one, which becomes text when it is printed."""
    monkeypatch.chdir(tmp_path)
    add_argument = argparse.ArgumentParser.add_argument

    def refuse(self, *names, **options):
        if "%" in options.get("help", ""):  # what Python 3.14 asks of each help
            options["help"] % {}
        return add_argument(self, *names, **options)

    monkeypatch.setattr("argparse.ArgumentParser.add_argument", refuse)
    assert run(monkeypatch, "describe", "list=mixers") == 0
    assert "longhorn" in capsys.readouterr().out
    assert argparse.ArgumentParser.add_argument is refuse


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
        ("predict", ["checkpoint=null", "top_k=null", "device=auto"]),
        ("prepare", ["input=null", "validation=0.01", "test=0.01"]),
        ("prepare_image", ["input=null", "size=null", "shard_bytes=1000000000"]),
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


def test_the_keys_that_most_trainings_say_can_be_given_as_they_are_told():
    text = resources.files("longseq.conf").joinpath("train.yaml").read_text("utf-8")
    section = text.split("what most commands say:\n")[1].split("\n\n")[0]
    given = [re.findall(r"[\w.]+=\S+", re.split(r"\s{3,}", line.strip())[0]) for line in section.splitlines()]
    assert len(given) == 10
    overrides = [override for line in given for override in line]
    with initialize_config_module("longseq.conf", version_base="1.3"):
        config = compose("train", overrides)
    assert (config.recipe.batch_size, config.init, config.output, config.seed) == (256, "FILE", "FOLDER", 1)


def test_a_verb_whose_help_lists_its_keys_has_them():
    files = resources.files("longseq.conf").iterdir()
    listed = {match[1] for file in files if file.is_file() and (match := KEYS_OF.search(file.read_text("utf-8")))}
    assert listed == set(key_help.KEYS)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", "runs"),
            "runs: is a folder, and a file is needed: name a file",
        ),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory", f"{__file__}/run"),
            f"{__file__} is a file, and a folder is",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
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
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"longseq: error: {told}")


def test_the_help_names_what_a_key_takes():
    told = key_help.describe_keys("predict").splitlines()
    (top_k,) = (line for line in told if line.startswith("top_k=null "))
    assert top_k.endswith("5 of an image, all of a document; a whole number of at least 1 or null")
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


def test_a_prompt_is_the_text_as_it_stands() -> None:
    texts = [
        "Hello, world",
        "f(x)",
        "{",
        "[1, 2",
        "true",
        "123",
        " ends ",
        "é #@~%",
        "a\nb",
        'say "hi"',
        "don't",
        "a=b",
        "x\\",
    ]
    texts += ["${oc.env:HOME}", "\\${x}", "\\\\${x}'", "'a' or 'b'"]
    generator = random.Random(0)
    texts += ["".join(generator.choices("a'\"\\${}[](), :=\n;", k=6)) for _ in range(40)]
    for text in texts:
        (override,) = cli.quote_texts("generate", [f"prompt={text}"])
        value = OverridesParser.create().parse_override(override).value()
        if text[0] != text[-1] or text[0] not in "'\"":
            assert OmegaConf.create({"prompt": value}).prompt == text
    # Hydra's own quotes, as they had to be before, and no prompt.
    assert cli.quote_texts("generate", ["prompt='def '", "prompt=null"]) == ["prompt='def '", "prompt=null"]
    assert cli.quote_texts("train", ["prompt=a b"]) == ["prompt=a b"]
    assert cli.quote_texts("prepare", ["separator=-1", "separator=None"]) == ["separator=-1", "separator=None"]
    assert cli.quote_texts("prepare", ["separator=[SEP]", "separator=</s>"]) == [
        "separator='[SEP]'",
        "separator='</s>'",
    ]


def test_a_path_needs_no_quotes_of_its_own(tmp_path, monkeypatch, capsys) -> None:
    for path in ("Bücher", "photos (2)", "a=b", "it's", "~/photos", "Bücher (2), neu", "50 % {x}"):
        (override,) = cli.quote_texts("train", [f"data.root={path}"])
        assert OmegaConf.create(
            {"root": OverridesParser.create().parse_override(override).value()}
        ).root == os.path.expanduser(path)
    for kept in ("data.root=[a,b]", "data.root='a b'", "data.root=/a/b-c.tar", "input=${oc.env:HOME}", "mixer=größe"):
        assert cli.quote_texts("train", [kept]) == [kept]
    monkeypatch.setenv("HOME", "/home/no one")
    assert cli.quote_texts("train", ["output=~/runs"]) == ["output='/home/no one/runs'"]  # not a folder named ~
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "evaluate", "checkpoint=Läufe (1)/best.ckpt") == 2
    assert "Läufe (1)/best.ckpt" in capsys.readouterr().err
