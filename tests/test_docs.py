"""The README and docs/: the site builds, the examples and the notebook run, and the top level has the right files."""

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
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import yaml
from documents import make_rows, write_jsonl
from examples import Example, find_examples, write_files
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from PIL import Image
from sources import ADDED, ROOT, TOP, UNPACKED

from longseq import kernels, plugins
from longseq.mixers import registry
from longseq.tasks import registry as tasks
from longseq.tasks.lm import report
from longseq.tools import cli

DOCS = ROOT / "docs"
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((DOCS / "pages").glob("*.md")))}

# Arguments added to `longseq train` in examples, so that it takes seconds; a timm model's width cannot be changed.
SHORT = ("+trainer.limit_train_batches=2", "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1")
SHORT += ("recipe.epochs=1", "recipe.schedule.warmup_epochs=0", "recipe.batch_size=8")
SHORT_TEXT = (*SHORT[:3], "recipe.updates=2", "recipe.schedule.warmup_updates=0", "recipe.batch_size=64")
SHORT_TEXT += ("recipe.validate_every_updates=2", "data.window=32", "model.d_model=16", "model.depth=1")
SHORT_DOCUMENTS = (*SHORT[:4], "recipe.schedule.warmup_updates=0", "recipe.batch_size=1024", "data.cache=cache")
SHORT_DOCUMENTS += ("callbacks.linear=null",)
NARROW = ("model.embed_dim=16", "model.depth=2", "data.num_workers=0")
INSTEAD = {
    "trainer=gpu": "trainer=cpu",
    "learning_rate_finder.num_training=50": "learning_rate_finder.num_training=20",
    "seed=0,1": "seed=0",  # a sweep of the mixers alone; 0 is the default
}


def find_commands(example: Example) -> Iterator[list[str]]:
    """The arguments of `longseq` in each command of a block."""
    for line in example.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        places = [index for index, word in enumerate(words) if Path(word).name == "longseq"]
        if places and "pip" not in words[places[0] - 1]:
            yield words[places[0] + 1 :]
        else:
            assert not words or example.not_run, f"only commands of longseq are run here: {line}"


@pytest.fixture(scope="module", autouse=True)
def short_samples() -> Iterator[None]:
    """Runs of language models write a few tokens in place of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_SAMPLE", 8)
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
    write_texts(here)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("XDG_CACHE_HOME", str(here / "cache"))
        train = ["train", "mixer=linear_attention", "trainer=cpu"]
        run_longseq([*train, *NARROW, *SHORT, "hydra.run.dir=outputs/image/RUN"])
        probe = ["task=probe", "model.d_model=16", "model.depth=1", "hydra.run.dir=outputs/probe/RUN"]
        run_longseq([*train, *probe, *SHORT])
        text = ["task=lm", "data=text", "data.root=TEXT.jsonl", "hydra.run.dir=outputs/lm/RUN"]
        run_longseq([*train, *text, *SHORT_TEXT])
        documents = [
            "mixer=attention",  # which torch.export reads in half the time
            "task=document",
            "data=documents",
            "data.root=DOCUMENTS.jsonl",
            "hydra.run.dir=outputs/document/RUN",
        ]
        run_longseq([*train[:1], *train[2:], *documents, *SHORT_DOCUMENTS, *SHORT_TEXT[-2:]])
        run_longseq(["prepare", "input=TEXT.jsonl", "output=MORE", "validation=0.1", "test=0.1", "processes=1"])
    return here


def write_texts(here: Path) -> None:
    """TEXT.jsonl, CHAT.jsonl of questions and answers, and DOCUMENTS.jsonl with labels."""
    write_jsonl(here / "DOCUMENTS.jsonl", make_rows())
    rows = [
        {"text": f"text {number} " * 20, "question": f"how {number}?", "answer": "so " * 20} for number in range(90)
    ]
    for name in ("TEXT", "CHAT"):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# The seconds in which sweeps were started.
STARTED = [0]


def run_longseq(words: Sequence[str]) -> str:
    """What `longseq WORDS` prints, run in this process."""
    if "-m" in words:
        while STARTED[-1] == int(time.time()):  # the name of a sweep's folder is its second
            time.sleep(0.05)
        STARTED.append(int(time.time()))
    kept, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["longseq", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    finally:
        sys.argv = kept
    assert code == 0, f"longseq {shlex.join(words)}\n{out.getvalue()}{err.getvalue()}"
    return out.getvalue()


def shorten(words: list[str]) -> list[str]:
    """The arguments of an example as they run here: on the CPU, and for a few batches if it trains."""
    words = [word for word in (INSTEAD.get(word, word) for word in words) if word != "seed=0"]
    if words[0] == "prepare":
        return [*words, "processes=1"]
    if words[0] == "export":
        return [*words, "latency=false"]
    if words[0] != "train" or "--help" in words or "--cfg" in words:
        return words
    taken = {word.partition("=")[0] for word in words}
    if "task=document" in words:
        size = () if "model=linear" in words else SHORT_TEXT[-2:]
        source = () if "data=documents" in words else ("data=documents", "data.root=DOCUMENTS.jsonl")
        return [*words, *source, *(word for word in (*SHORT_DOCUMENTS, *size) if word.partition("=")[0] not in taken)]
    if "task=lm" in words:
        return [*words, *(word for word in SHORT_TEXT if word.partition("=")[0] not in taken)]
    image = not any(word.startswith("task=") for word in words)
    foreign = {"model=timm", "model=own"} & set(words)
    width = () if not image else NARROW[-1:] if foreign else NARROW
    return [*words, *(word for word in (*SHORT, *width) if word.partition("=")[0] not in taken)]


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
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # a file of an example is a module, as in a folder of one's own
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
            elif words and (short := sorted(shorten(words))) not in ALREADY:  # `longseq` alone has its own tests
                ALREADY.append(short)
                run_longseq(shorten(words))


# Commands that an earlier page has shown, and that ran; `longseq train` is the run above.
ALREADY: list[list[str]] = [sorted(shorten(["train"]))]


FLAGS = {"-m", "--multirun"}
OF_HYDRA = ("hydra.", "hydra/", "hparams_search=")  # what Hydra runs, and where


def compose_command(words: list[str]) -> None:
    """Check an example that is not run: its groups and keys exist."""
    verb = next(name for name in cli.VERBS if words[: len(name.split())] == name.split())
    given = words[len(verb.split()) :]
    given = [word for word in given if word not in FLAGS and not word.lstrip("+").startswith(OF_HYDRA)]
    overrides = [word.split(",")[0] if FLAGS & set(words) else word for word in given]  # the first trial of a sweep
    with initialize_config_module("longseq.conf", version_base="1.3"):
        compose(verb.replace(" ", "_"), cli.overrides_for_hydra(verb, overrides))


def test_examples_that_are_not_run_say_why_and_are_the_few():
    reasons = [example.not_run for page in PAGES.values() for example in find_examples(page) if example.not_run]
    assert all(len(reason) > len("not run: ") or reason == "test command" for reason in reasons)
    assert len(reasons) < 28


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
    assert len(pages) >= len(PAGES) + 4
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert {name: found for name, text in pages.items() if (found := fetched.findall(text))} == {}
    operations = [name for name in kernels.__all__ if not name.endswith("_step")]
    for name in ("ImageBackbone", "TokenBackbone", "Mixer", "create", "export_image_classifier", *operations):
        assert re.search(rf'id="[\w.]*\b{name}"', pages["reference.html"]), f"the reference lacks {name}"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads((DOCS / "notebook.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
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


def test_no_page_holds_the_marks_of_a_merge():
    for name, page in PAGES.items():
        assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(encoding="utf-8"), re.MULTILINE), name


def test_the_top_level_holds_what_is_listed():
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    found = {path.name for path in ROOT.iterdir() if not any(fnmatch(path.name, pattern) for pattern in ignored)}
    assert found - {".git"} == (TOP | ADDED if UNPACKED else TOP)


def test_every_mixer_has_a_family():
    table = re.search(r"## The families\n(.*?)\n## ", PAGES["mixers.md"].read_text(), re.S)
    named = set(re.findall(r"`(\w+)`", "".join(line for line in table[1].splitlines() if line.startswith("|"))))
    assert named - {"mixer"} == set(registry.mixer_names())


def test_the_readme_is_one_screen():
    text = re.sub(r"<!-- table (\w+) -->.*<!-- end of \1 -->", "", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(text.splitlines()) <= 90


def test_the_citation_and_the_changes_are_of_this_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version[1]
    assert citation["cff-version"] == "1.2.0"
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_the_public_forge_runs_the_test_command_on_every_python_that_is_promised():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    least = re.search(r'^requires-python = ">=(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert least is not None
    assert job["strategy"]["matrix"]["python"][0] == least[1]
