"""Format, lint and types are part of the one test command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_types(tmp_path: Path) -> None:
    # The checker must see the folders where they install, below `longseq`: a folder of links shows them so.
    package = tmp_path / "longseq"
    package.mkdir()
    for item in (ROOT / "longseq").iterdir():
        if item.name != "__pycache__":
            (package / item.name).symlink_to(item)
    for name in ("conf", "kernels", "tasks", "tools"):
        (package / name).symlink_to(ROOT / name)
    run_tool("mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache", package, cwd=tmp_path)
