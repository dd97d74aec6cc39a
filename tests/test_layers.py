"""The house: imports point down, and importing the library is cheap and touches no accelerator."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A layer imports from itself and from those before it.
LAYERS = (
    ("longseq.kernels", ROOT / "kernels"),
    ("longseq.state", ROOT / "longseq" / "state.py"),
    ("longseq.parameters", ROOT / "longseq" / "parameters.py"),
    ("longseq.arguments", ROOT / "longseq" / "arguments.py"),
    ("longseq.plugins", ROOT / "longseq" / "plugins.py"),
    ("longseq.blocks", ROOT / "longseq" / "blocks"),
    ("longseq.mixers", ROOT / "longseq" / "mixers"),
    ("longseq.timm_models", ROOT / "longseq" / "timm_models.py"),
    ("longseq.model_card", ROOT / "longseq" / "model_card.py"),
    ("longseq.models", ROOT / "longseq" / "models.py"),
    ("longseq.backbones", ROOT / "longseq" / "backbones"),
    ("longseq", ROOT / "longseq" / "__init__.py"),
    ("longseq.timm_script", ROOT / "longseq" / "timm_script.py"),
    ("longseq.tasks", ROOT / "tasks"),
    ("longseq.tools", ROOT / "tools"),
)
NAMES = [name for name, _ in LAYERS]


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


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_import_adds_no_triton_and_no_cuda() -> None:
    output = run_python(
        "import sys, torch, timm\n"
        "before = {m for m in sys.modules if m.split('.')[0] == 'triton'}\n"
        "import longseq, longseq.kernels, longseq.mixers\n"
        "after = {m for m in sys.modules if m.split('.')[0] == 'triton'}\n"
        "print(sorted(after - before), torch.cuda.is_initialized())"
    )
    assert output.strip() == "[] False"


@pytest.mark.slow
def test_import_works_without_lightning_and_hydra() -> None:
    output = run_python(
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['hydra'] = sys.modules['omegaconf'] = None\n"
        "import longseq, timm\n"
        "print(len(timm.list_models('longseq_*')) > 0)"
    )
    assert output.strip() == "True"


def test_kernels_import_without_timm() -> None:
    # The package's own __init__ registers image models; the kernels below it must not need them.
    for file in (ROOT / "kernels").rglob("*.py"):
        third_party = {m.split(".")[0] for m in imported_modules(file.read_text())} - set(sys.stdlib_module_names)
        assert third_party <= {"longseq", "torch", "triton"}, f"{file.relative_to(ROOT)} imports {third_party}"
