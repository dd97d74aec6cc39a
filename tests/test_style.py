"""Format, lint and types are part of the one test command."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from sources import ROOT, needs_links

FOLDERS = ("benchmarks", "conf", "docs", "kernels", "longseq", "tasks", "tests", "tools")
USERS = ("script", "training")  # tests/user_NAME.py


def run_tool(name: str, *arguments: str | Path, cwd: Path = ROOT) -> None:
    # The tool's script, not `python -m`: from the root, that would let ./kernels shadow the package of that name.
    script = Path(sys.executable).with_name(name)
    result = subprocess.run([script, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_format() -> None:
    run_tool("ruff", "format", "--check", *FOLDERS)


def test_lint() -> None:
    run_tool("ruff", "check", *FOLDERS)


def find_remarks(source: str) -> list[str]:
    """The docstrings of a file and its comments, each in one line; comments on adjacent lines are one."""
    remarks, comment, last = [], "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                remarks.append(comment)
                comment = ""
            comment, last = f"{comment} {token.string.lstrip('# ')}", token.start[0]
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            remarks.append(" ".join(token.string.split()))
    return [*remarks, comment]


def test_times_in_comments_say_where_their_rows_are() -> None:
    """A time without its row is of a machine and a version that nobody knows."""
    time = re.compile(r"\d\s*(ms|µs|milliseconds?|microseconds?)\b")
    remarks = []
    for folder in ("kernels", "longseq", "tasks", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            if time.search(source := file.read_text(encoding="utf-8")):
                remarks += [(file.name, remark) for remark in find_remarks(source) if time.search(remark)]
    assert remarks
    assert [(name, remark) for name, remark in remarks if "benchmarks/" not in remark] == []


@pytest.mark.slow
def test_types() -> None:
    if Version(version("numpy")) < Version("2.3"):
        pytest.skip("numpy 2.2, the newest for Python 3.10, has other types")
    # The types of numpy 2.5 are in the syntax of Python 3.12, which mypy misreads where it is told of an older one.
    told = ("--python-version", f"3.{sys.version_info.minor}") if Version(version("numpy")) >= Version("2.5") else ()
    run_tool("mypy", "--cache-dir", os.devnull, *told, "longseq")


# What pyright is told for a check of the package. mypy reads the same files with the types of other packages, and
# these rules are among its own; to pyright, what comes from another package may have any type.
MYPYS_RULES = ("InvalidTypeArguments", "OptionalCall", "OptionalMemberAccess", "OptionalOperand", "OptionalSubscript")
STUB = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"


def run_pyright(folder: Path, others: Iterable[str], **settings: Any) -> None:
    """Run pyright in a folder, where the modules of other packages named in `others` have no types."""
    for module in others:
        for length in range(1, module.count(".") + 2):
            package = Path(folder, "stubs", *module.split(".")[:length])
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.pyi").write_text(STUB)
    environments = [{"root": str(ROOT)}]
    project = {"extends": str(ROOT / "pyproject.toml"), "stubPath": "stubs", "executionEnvironments": environments}
    (folder / "pyrightconfig.json").write_text(json.dumps(project | settings))
    # As a module, in a folder that holds no other: its script is not in every environment's folder.
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", folder]
    environment = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=128"}  # fewer collections of garbage
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def find_other_modules() -> set[str]:
    """The modules of other packages that the package imports.."""
    found = set()
    for folder in ("conf", "kernels", "longseq", "tasks", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module)
    others = {name.split(".")[0] for name in found} - {"longseq", *sys.stdlib_module_names}
    installed = {name for name in others if importlib.util.find_spec(name) is not None}
    return {name for name in found if name.split(".")[0] in installed}


@needs_links
@pytest.mark.slow
def test_an_editor_resolves_every_import_of_the_package(tmp_path: Path) -> None:
    """pyright's messages for the package; pyproject.toml turns some of its rules off.

    It would read the other packages for half a minute. Here it only looks whether their modules are there.
    """
    rules: dict[str, Any] = {f"report{rule}": False for rule in MYPYS_RULES}
    run_pyright(tmp_path, find_other_modules(), **rules, reportMissingModuleSource="error")


@pytest.mark.slow
def test_an_editor_knows_the_types_in_a_users_program(tmp_path: Path) -> None:
    """pyright's messages for two programs, with the types of torch, timm and Lightning.

    It would read all models of transformers, as long as all else, for the sake of a few names that have no types here.
    """
    run_pyright(tmp_path, ["transformers"], include=[str(ROOT / "tests" / f"user_{name}.py") for name in USERS])
