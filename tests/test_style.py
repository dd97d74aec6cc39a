"""Format, lint and types are part of the one test command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "conf", "docs", "kernels", "longseq", "tasks", "tests", "tools")


def run_tool(name: str, *arguments: str | Path, cwd: Path = ROOT) -> None:
    # The tool's script, not `python -m`: from the root, that would let ./kernels shadow the package of that name.
    script = Path(sys.executable).with_name(name)
    result = subprocess.run([script, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_format() -> None:
    run_tool("ruff", "format", "--check", *FOLDERS)


def test_lint() -> None:
    run_tool("ruff", "check", *FOLDERS)


@pytest.mark.slow
def test_types() -> None:
    run_tool("mypy", "--cache-dir", os.devnull, "longseq")


@pytest.mark.slow
def test_an_editor_resolves_every_import(tmp_path: Path) -> None:
    """pyright's messages for the package and for a user's script; pyproject.toml turns some of its rules off.

    It would read all models of transformers, as long as all else, for the sake of a few names that have no types here.
    """
    (tmp_path / "stubs" / "transformers").mkdir(parents=True)
    stub = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"
    (tmp_path / "stubs" / "transformers" / "__init__.pyi").write_text(stub)
    project = {
        "extends": str(ROOT / "pyproject.toml"),
        "stubPath": "stubs",
        "executionEnvironments": [{"root": str(ROOT)}],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(project))
    # As a module, in a folder that holds no other: its script is not in every environment's folder.
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", tmp_path]
    environment = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=128"}  # fewer collections of garbage
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
