"""The layers of the package: imports point down, and the library imports no training packages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up: each may import those before it. The folders at the top come after those below longseq/.
LAYERS = ("kernels", "blocks", "mixers", "backbones", "tasks", "tools")
# Folders of tasks/: what all tasks share, what tasks on text share, and the tasks, each by itself.
SHARED = ("data", "training")
TEXT = "text"
TASKS = sorted(path.parent.name for path in (ROOT / "tasks").glob("*/config.py"))


def imported_modules(file: Path) -> Iterator[str]:
    """The dotted names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.relative_to(ROOT)}: imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def assert_imports_none_of(path: Path, banned: list[str]) -> None:
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for module in imported_modules(file):
            found = [name for name in banned if module == name or module.startswith(f"{name}.")]
            assert not found, f"{file.relative_to(ROOT)} imports {module}"


@pytest.mark.slow
def test_imports_point_down() -> None:
    for number, layer in enumerate(LAYERS):
        folder = ROOT / layer if (ROOT / layer).is_dir() else ROOT / "longseq" / layer
        assert_imports_none_of(folder, [f"longseq.{name}" for name in LAYERS[number + 1 :]])
    for file in (ROOT / "longseq").glob("*.py"):
        if file.name != "__main__.py":
            assert_imports_none_of(file, ["longseq.tasks", "longseq.tools"])


@pytest.mark.slow
def test_tasks_import_no_other_task() -> None:
    assert len(TASKS) >= 2
    for folder in (*SHARED, TEXT, *TASKS):
        above = {TEXT, *TASKS} if folder in SHARED else {*TASKS} - {folder}
        assert_imports_none_of(ROOT / "tasks" / folder, [f"longseq.tasks.{name}" for name in above - {folder}])


@pytest.mark.slow
def test_the_library_imports_no_training_packages() -> None:
    for file in (ROOT / "kernels").rglob("*.py"):
        others = {module.split(".")[0] for module in imported_modules(file)} - set(sys.stdlib_module_names)
        assert others <= {"longseq", "torch", "triton"}, f"{file.relative_to(ROOT)} imports {others}"
    # rglob leaves out the linked folders of tasks and tools.
    assert_imports_none_of(ROOT / "longseq", ["lightning", "hydra", "omegaconf", "torchmetrics", "tensorboard"])
