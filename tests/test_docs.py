"""The README and docs/: the examples and the notebook run, commands in the text exist, and the site builds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from documents import make_rows, write_jsonl
from examples import Example, find_examples, write_files
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from PIL import Image

from longseq import kernels, plugins
from longseq.mixers import registry
from longseq.tasks import registry as tasks
from longseq.tasks.lm import module as lm
from longseq.tools import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((DOCS / "pages").glob("*.md")))}

# Arguments added to `longseq train` in examples, so that it takes seconds; a timm model's width cannot be changed.
SHORT = ("+trainer.limit_train_batches=2", "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1")
SHORT += ("recipe.epochs=1", "recipe.schedule.warmup_epochs=0", "recipe.batch_size=8")
SHORT_TEXT = (*SHORT[:3], "recipe.updates=2", "recipe.schedule.warmup_updates=0", "recipe.batch_size=64")
SHORT_TEXT += ("recipe.validate_every_updates=2", "data.window=32", "model.d_model=16", "model.depth=1")
SHORT_DOCUMENTS = (*SHORT[:4], "recipe.schedule.warmup_updates=0", "recipe.batch_size=1024", "data.cache=cache")
NARROW = ("model.embed_dim=16", "model.depth=1", "data.num_workers=0")
INSTEAD = {"trainer=gpu": "trainer=cpu", "learning_rate_finder.num_training=50": "learning_rate_finder.num_training=20"}
INSTEAD["recipe.updates=200"] = "recipe.updates=2"
OF_HYDRA = ("hydra.", "hydra/", "hparams_search=")  # what Hydra runs, and where


@pytest.fixture(scope="module", autouse=True)
def short_samples() -> Iterator[None]:
    """Runs of language models write a few tokens in place of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "_SAMPLE", 8)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the examples run: finished runs called RUN, folders of images and files of text."""
    here = tmp_path_factory.mktemp("examples")
    random = np.random.default_rng(0)
    layouts = {"FOLDER/train": (("ant", "bee"), (40, 40, 3)), "FOLDER/val": (("ant", "bee"), (40, 40, 3))}
    layouts["DIGITS"] = (tuple("0123456789"), (8, 8))
    for name, (classes, shape) in layouts.items():
        for one in classes:
            (here / name / one).mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 256, shape, np.uint8)
                Image.fromarray(pixels).save(here / name / one / f"{number}.png")
    write_jsonl(here / "DOCUMENTS.jsonl", make_rows())
    rows = [{"text": f"text {n} " * 20, "question": f"how {n}?", "answer": "so " * 20} for n in range(90)]
    for name in ("TEXT", "CHAT"):
        write_jsonl(here / f"{name}.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("XDG_CACHE_HOME", str(here / "cache"))
        train = ["train", "mixer=linear_attention", "trainer=cpu"]
        run_longseq([*train, *NARROW, *SHORT, "hydra.run.dir=outputs/image/RUN"])
        probe = ["task=probe", "model.d_model=16", "model.depth=1", "hydra.run.dir=outputs/probe/RUN"]
        run_longseq([*train, *probe, *SHORT])
        text = ["task=lm", "data=text", "data.root=TEXT.jsonl", "hydra.run.dir=outputs/lm/RUN"]
        run_longseq([*train, *text, *SHORT_TEXT])
        documents = ["task=document", "data=documents", "data.root=DOCUMENTS.jsonl", "mixer=attention", "trainer=cpu"]
        run_longseq(["train", *documents, *SHORT_DOCUMENTS, *SHORT_TEXT[-2:], "hydra.run.dir=outputs/document/RUN"])
        run_longseq(["prepare", "input=TEXT.jsonl", "output=MORE", "validation=0.1", "test=0.1", "processes=1"])
    return here


def find_commands(example: Example) -> Iterator[list[str]]:
    """The arguments of `longseq` in each command of a block."""
    for line in example.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        places = [index for index, word in enumerate(words) if Path(word).name == "longseq"]
        if places and "pip" not in words[places[0] - 1]:
            yield words[places[0] + 1 :]
        else:
            assert not words or example.not_run, f"only commands of longseq are run here: {line}"


# The seconds in which sweeps were started.
STARTED = [0]


def run_longseq(words: Sequence[str]) -> None:
    """Run `longseq WORDS` in this process."""
    if "-m" in words:
        while STARTED[-1] == int(time.time()):  # the name of a sweep's folder is its second
            time.sleep(0.05)
        STARTED.append(int(time.time()))
    kept, out = sys.argv, io.StringIO()
    sys.argv = ["longseq", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = cli.main()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    finally:
        sys.argv = kept
    assert code == 0, f"longseq {shlex.join(words)}\n{out.getvalue()}"


def shorten(words: list[str]) -> list[str]:
    """The arguments of an example as they run here: on the CPU, for a few batches, and the first run of a sweep."""
    words = [INSTEAD.get(word, word.split(",")[0] if "-m" in words else word) for word in words]
    added: tuple[str, ...] = {"prepare": ("processes=1",), "export": ("latency=false", "batch_sizes=[1]")}.get(
        words[0], ()
    )
    if words[0] == "train" and not {"--help", "--cfg"} & {*words}:
        if "task=document" in words:
            source = () if "data=documents" in words else ("data=documents", "data.root=DOCUMENTS.jsonl")
            added = (*source, *SHORT_DOCUMENTS, *(() if "model=linear" in words else SHORT_TEXT[-2:]))
        elif "task=lm" in words:
            added = SHORT_TEXT
        elif any(word.startswith("task=") for word in words):
            added = SHORT
        else:
            added = (*SHORT, *(NARROW[-1:] if {"model=timm", "model=own"} & {*words} else NARROW))
            if "mixer=hybrid" in words:  # two kinds of layers
                added = tuple(word.replace("depth=1", "depth=2") for word in added)
    taken = {word.partition("=")[0] for word in words}
    taken |= {"recipe.epochs"} if "recipe.updates" in taken else set()
    return [*words, *(word for word in added if word.partition("=")[0] not in taken)]


# What commands that ran have had; `longseq train` is the run above.
TRIED = {("train", "task=image", "train")}


def find_choices(words: list[str]) -> set[tuple[str, str, str]]:
    """What may fail in a command where it has not in another: groups, files and keys, for a verb and a task.

    Values of single keys of a training have tests of their own.
    """
    verb, task = words[0], next((word for word in words if word.startswith("task=")), "task=image")
    found = {(verb, task, verb)}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key in ("task", "data", "model", "recipe", "format", "output", "input"):
            found.add((verb, task, word))
        elif key == "checkpoint":  # that of a task
            found.add((verb, task, "/".join(value.split("/")[:2])))
        elif verb != "train" or "." not in key:
            found.add((verb, task, key))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_examples_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # a test that comes later is not within a command
    # Examples are plug-ins with a mixer and a task of their own, which other tests must not find.
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(tasks, "_registered", dict(tasks._registered))
    monkeypatch.setattr(plugins, "_LOADED", dict(plugins._LOADED))
    monkeypatch.setattr(sys, "path", ["", str(DOCS / "programs"), *sys.path])
    for module in ("my_module", "majority"):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    names: dict[str, object] = {"__name__": f"examples_of_{name}"}
    write_files(PAGES[name], Path())
    for example in find_examples(PAGES[name]):
        if example.language == "python" and example.file is None and example.not_run is None:
            exec(compile("\n" * example.line + example.text, str(PAGES[name]), "exec"), names)
        if example.language != "bash":
            continue
        for words in find_commands(example):
            if example.not_run or words[:1] == ["compare"]:  # it trains each mixer in a process of its own
                compose_command(words)
            elif words and "--help" not in words:
                if find_choices(words) <= TRIED:
                    compose_command([word for word in words if word not in ("--cfg", "job")])
                else:
                    run_longseq(shorten(words))
                    TRIED.update(find_choices(words))


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_the_text_exist(name: str):
    """Their groups and keys do."""
    verbs = "|".join(cli.VERBS)
    for command in re.findall(rf"`longseq ((?:{verbs}) [^`]+)`", PAGES[name].read_text()):
        if not {"VERB", "--help", "--config-dir"} & {*command.split()}:
            compose_command(shlex.split(command.replace("\\|", "|")))


def compose_command(words: list[str]) -> None:
    """Check a command that is not run: its groups and keys exist."""
    sweeps = bool({"-m", "--multirun"} & {*words})
    given = [word for word in words[1:] if word != "-m" and not word.lstrip("+").startswith(OF_HYDRA)]
    given = [word.split(",")[0] if sweeps else word for word in given]  # the first trial of a sweep
    verb = cli._find_verb(found := [words[0], *given])
    with initialize_config_module("longseq.conf", version_base="1.3"):
        compose(verb, cli.overrides_for_hydra(verb, found[1:]))


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path):
    site = tmp_path / "site"
    offline = "import socket, sys; socket.socket.connect = None; from mkdocs.__main__ import cli; cli(sys.argv[1:])"
    command = ["build", "--strict", "--quiet", "--config-file", DOCS / "mkdocs.yml", "--site-dir", site]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = [sys.executable, "-c", offline, *map(str, command)]
    result = subprocess.run(run, cwd=DOCS, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {page.name: page.read_text() for page in site.glob("*.html")}
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert {name: found for name, text in pages.items() if (found := fetched.findall(text))} == {}
    operations = [name for name in kernels.__all__ if not name.endswith("_step")]
    for name in ("ImageBackbone", "TokenBackbone", "Mixer", "create", "export_image_classifier", *operations):
        assert re.search(rf'id="[\w.]*\b{name}"', pages["reference.html"]), f"the reference lacks {name}"
    assert "data.img_size=..." in pages["keys.html"]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads((DOCS / "notebook.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec("".join(cell["source"]), names)
        shown = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        # Trained figures differ in their last digits from machine to machine.
        assert re.sub(r"\d+\.\d+", "#", printed.getvalue()) == re.sub(r"\d+\.\d+", "#", shown)


def test_the_picture_of_the_readme_is_that_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    picture = __import__("picture")
    assert picture.draw() == picture.FILE.read_text(), "run python benchmarks/picture.py"


def test_every_mixer_has_a_family():
    table = re.search(r"## The families\n(.*?)\n## ", PAGES["mixers.md"].read_text(), re.S)
    named = set(re.findall(r"`(\w+)`", "".join(line for line in table[1].splitlines() if line.startswith("|"))))
    assert named - {"mixer"} == set(registry.mixer_names())
