"""The layers of the package: imports point down, and importing the library is cheap and touches no accelerator."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A layer imports from itself and from those before it.
LAYERS = (
    ("longseq.kernels", ROOT / "kernels"),
    ("longseq.version", ROOT / "longseq" / "version.py"),
    ("longseq.state", ROOT / "longseq" / "state.py"),
    ("longseq.files", ROOT / "longseq" / "files.py"),
    ("longseq.parameters", ROOT / "longseq" / "parameters.py"),
    ("longseq.arguments", ROOT / "longseq" / "arguments.py"),
    ("longseq.plugins", ROOT / "longseq" / "plugins.py"),
    ("longseq.blocks", ROOT / "longseq" / "blocks"),
    ("longseq.mixers", ROOT / "longseq" / "mixers"),
    ("longseq.timm_models", ROOT / "longseq" / "timm_models.py"),
    ("longseq.plugin_models", ROOT / "longseq" / "plugin_models.py"),
    ("longseq.model_card", ROOT / "longseq" / "model_card.py"),
    ("longseq.models", ROOT / "longseq" / "models.py"),
    ("longseq.backbones", ROOT / "longseq" / "backbones"),
    ("longseq.registration", ROOT / "longseq" / "registration.py"),
    ("longseq", ROOT / "longseq" / "__init__.py"),
    ("longseq.timm_script", ROOT / "longseq" / "timm_script.py"),
    ("longseq.tasks", ROOT / "tasks"),
    ("longseq.tools", ROOT / "tools"),
    ("longseq.__main__", ROOT / "longseq" / "__main__.py"),
)
NAMES = [name for name, _ in LAYERS]

# Inside tasks: what all tasks share, what tasks on text share, each task by itself, and the commands above
# them all.
SHARED = tuple(
    f"longseq.tasks.{name}"
    for name in ("data", "training", "report", "circumstances", "config", "commands", "registry")
)
TEXT = "longseq.tasks.text"
TASKS = tuple(sorted(f"longseq.tasks.{path.parent.name}" for path in (ROOT / "tasks").glob("*/config.py")))


def imported_modules(source: str) -> set[str]:
    """Return the dotted names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def layer_of(module: str) -> str | None:
    """Return the layer that a module of ours belongs to, the longest name that matches."""
    matches = [name for name in NAMES if module == name or module.startswith(name + ".")]
    return max(matches, key=len) if matches else None


@pytest.mark.parametrize(("name", "path"), LAYERS, ids=NAMES)
@pytest.mark.slow
def test_imports_point_down(name: str, path: Path) -> None:
    allowed = set(NAMES[: NAMES.index(name) + 1])
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for module in imported_modules(file.read_text()):
            if not module.startswith("longseq"):
                continue
            layer = layer_of(module)
            if layer == "longseq" and module != "longseq":
                continue  # a name imported from the package itself, whose layer another entry has named
            assert layer in allowed, f"{file.relative_to(ROOT)} imports {module}, which stands above {name}"


def named_modules(source: str) -> set[str]:
    """Return what a file imports, and our modules that its strings name, such as those of targets."""
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    named = {text for text in strings if isinstance(text, str) and re.fullmatch(r"longseq(\.\w+)+", text)}
    return imported_modules(source) | named


def room_of(module: str) -> str:
    """Return the layer of a module of the tasks: one of SHARED, TEXT or TASKS, or "commands"."""
    rooms = (*SHARED, TEXT, *TASKS)
    return next((room for room in rooms if module == room or module.startswith(f"{room}.")), "commands")


@pytest.mark.slow
def test_rooms_of_the_tasks_name_those_below_them():
    assert len(TASKS) >= 2
    for file in sorted((ROOT / "tasks").rglob("*.py")):
        own = room_of(".".join(("longseq.tasks", *file.relative_to(ROOT / "tasks").with_suffix("").parts)))
        if own == "commands":
            continue
        allowed = {*SHARED, own, *((TEXT,) if own not in (*SHARED, TEXT) else ())}
        for module in named_modules(file.read_text()):
            if module.startswith("longseq.tasks."):
                told = f"{file.relative_to(ROOT)} names {module}"
                assert room_of(module) in allowed, f"{told}, of a room above it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "banned"),
    [
        (ROOT / "kernels", {"lightning", "hydra", "omegaconf", "timm", "torchvision", "torchmetrics"}),
        (ROOT / "longseq", {"lightning", "hydra", "omegaconf", "torchmetrics", "tensorboard"}),
    ],
    ids=["kernels", "longseq"],
)
def test_library_does_not_name_training_packages(path: Path, banned: set[str]) -> None:
    for file in path.rglob("*.py"):
        roots = {module.split(".")[0] for module in imported_modules(file.read_text())}
        assert not roots & banned, f"{file.relative_to(ROOT)} imports {roots & banned}"


@pytest.mark.slow
def test_kernels_import_without_timm() -> None:
    # The package's own __init__ registers image models; the kernels below it must not need them.
    for file in (ROOT / "kernels").rglob("*.py"):
        third_party = {m.split(".")[0] for m in imported_modules(file.read_text())} - set(sys.stdlib_module_names)
        assert third_party <= {"longseq", "torch", "triton"}, f"{file.relative_to(ROOT)} imports {third_party}"
