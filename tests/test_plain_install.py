"""longseq where only the packages that it requires are installed, and none that its extras bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import longseq

# Prints the modules of longseq that cannot be imported. Then runs `longseq` with each list of arguments in a fork that
# has the imports already, and prints the exit codes.
PROGRAM = """
import importlib, json, os, pkgutil, sys
import longseq
left = [(longseq.__path__, "longseq.")]
for path, prefix in left:
    for found in pkgutil.iter_modules(path, prefix):
        if found.name == "longseq.__main__":
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError:
            print("missing:", found.name, flush=True)
        else:
            if found.ispkg:
                left.append((module.__path__, found.name + "."))

from longseq.tools import cli
codes = []
for arguments in json.loads(sys.argv[1]):
    process = os.fork()
    if process == 0:
        sys.argv = ["longseq", *arguments]
        code = 1
        try:
            code = cli.main()
        except SystemExit as leaving:
            code = leaving.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print("exit codes:", codes)
"""
BRIEF = ("recipe.epochs=null", "recipe.updates=2", "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1")
IMAGE = ("model.embed_dim=16", "model.depth=1")
TEXT = ("model.d_model=16", "model.depth=1")


def installed_without_extras() -> set[str]:
    """longseq and all that pip installs with it: what it requires, what that requires, and so on."""
    left = [("longseq", "")]  # packages, each with one of the extras that it is required with
    for name, extra in left:
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted = [(canonicalize_name(requirement.name), one) for one in ("", *requirement.extras)]
                left.extend(one for one in wanted if one not in left)
    return {name for name, _ in left}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to the files of those packages, as site-packages has after `pip install longseq`."""
    folder = tmp_path_factory.mktemp("plain")
    for name in installed_without_extras():
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith(".pth") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    if not (folder / "longseq").exists():  # an editable install has no files but its metadata
        (folder / "longseq").symlink_to(Path(longseq.__file__).parent)
    return folder


@pytest.mark.slow
def test_all_modules_are_imported_and_every_task_trains(plain: Path, tmp_path: Path) -> None:
    """All modules but those for an extra; trained models are exported and generate."""
    rows = ({"text": f"{word} {n}", "label": word} for n in range(20) for word in ("good", "bad"))
    (tmp_path / "documents.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    commands = (
        ("train", *IMAGE, *BRIEF, "output=image"),
        ("train", "task=lm", *TEXT, *BRIEF, "data.window=64", "recipe.batch_size=256", "recipe.tokens=null",
         "recipe.validate_every_updates=null", "output=lm"),
        ("train", "task=document", "data=documents", "data.root=documents.jsonl", *TEXT, *BRIEF, "recipe.batch_size=64",
         "output=document"),
        ("train", "task=probe", *TEXT, *BRIEF, "mixer=deltanet", "recipe.batch_size=8", "output=probe"),
        ("export", "checkpoint=image/checkpoints/best.ckpt", "format=torchscript", "output=model.pt", "latency=false"),
        ("generate", "checkpoint=lm/checkpoints/best.ckpt", "prompt=one", "max_new_tokens=2"),
    )  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, json.dumps(commands)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(plain)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    of_extras = ("missing: longseq.tools.harness.", "missing: longseq.tools.hugging_face.")
    assert [line for line in lines if line.startswith("missing:") and not line.startswith(of_extras)] == []
    assert lines[-1] == f"exit codes: {[0] * len(commands)}", done.stdout + done.stderr
    assert (tmp_path / "model.pt").is_file()
