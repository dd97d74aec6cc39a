"""Format, lint and types are part of the one test command."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = ("benchmarks", "conf", "docs", "kernels", "longseq", "tasks", "tests", "tools")
PROGRAMS = [str(ROOT / "tests" / f"user_{name}.py") for name in ("script", "training")]


def run_tool(name: str, *arguments: str) -> None:
    # Run the tool's script, not `python -m`: in the root, ./kernels would hide the package of that name.
    script = Path(sys.executable).with_name(name)
    result = subprocess.run([script, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_format_and_lint() -> None:
    run_tool("ruff", "format", "--check", *FOLDERS)
    run_tool("ruff", "check", *FOLDERS)


@pytest.mark.slow
def test_types() -> None:
    numpy = Version(version("numpy"))
    if numpy < Version("2.3"):
        pytest.skip("numpy 2.2, the newest for Python 3.10, has other types")
    # numpy 2.5 types use the syntax of Python 3.12, which mypy misreads when it targets an older version.
    target = ("--python-version", f"3.{sys.version_info.minor}") if numpy >= Version("2.5") else ()
    run_tool("mypy", *target, "longseq")


@pytest.mark.slow
def test_an_editor_knows_the_types_in_a_users_program(tmp_path: Path) -> None:
    """pyright checks two programs with the types of torch, timm and Lightning, but without the large transformers."""
    (tmp_path / "stubs" / "transformers").mkdir(parents=True)
    stub = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"
    (tmp_path / "stubs" / "transformers" / "__init__.pyi").write_text(stub)
    project = {
        "extends": str(ROOT / "pyproject.toml"),
        "include": PROGRAMS,
        "stubPath": "stubs",
        "executionEnvironments": [{"root": str(ROOT)}],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(project))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
