"""kernels/README.md names every operation's folder, every module that they share, and every launched kernel."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import longseq.kernels

ROOT = Path(longseq.kernels.__file__).parent
README = (Path(__file__).parents[2] / "kernels" / "README.md").read_text()  # not part of an installed package
TAKE_KERNELS = ("Prepared", "find_launch", "_launch")  # functions whose first argument is a kernel
FOLDERS = sorted(file.parent for file in ROOT.glob("*/__init__.py"))


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def launched(folder: Path, steps: bool) -> set[str]:
    """Kernels of a folder that are launched: `kernel[grid](...)`, or by one of TAKE_KERNELS."""
    trees = [
        ast.parse(file.read_text()) for file in folder.glob("triton_*.py") if (file.stem == "triton_step") == steps
    ]
    kernels = {node.name for tree in trees for node in tree.body if is_kernel(node)}
    nodes = [inner for tree in trees for node in tree.body if not is_kernel(node) for inner in ast.walk(node)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    begun = [call.func.value for call in calls if isinstance(call.func, ast.Subscript)]
    begun += [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id in TAKE_KERNELS]
    return kernels & {name.id for part in begun for name in ast.walk(part) if isinstance(name, ast.Name)}


@pytest.mark.slow
def test_every_kernel_is_launched_or_a_part_of_another():
    """Otherwise a kernel is launched in a way that the tests here do not find."""
    trees = [ast.parse(file.read_text()) for file in ROOT.rglob("triton_*.py")]
    kernels = [node for tree in trees for node in tree.body if is_kernel(node)]
    parts = {name.id for node in kernels for name in ast.walk(node) if isinstance(name, ast.Name)}
    known = parts.union(*(launched(folder, steps) for folder in FOLDERS for steps in (False, True)))
    assert {node.name for node in kernels} - known == set()


def section(name: str) -> str:
    """The text below the heading with the name in backticks."""
    found = re.search(rf"^### [^\n]*`{name}`[^\n]*\n(.*?)(?=^##|\Z)", README, re.M | re.S)
    assert found, f"kernels/README.md has no heading with `{name}`"
    return found[1]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_table_of_an_operation_has_the_kernels_that_it_launches(folder):
    assert set(re.findall(r"^\| `(\w+)`", section(folder.name), re.M)) == launched(folder, steps=False)


def test_the_table_of_one_token_has_the_kernels_that_steps_launch():
    table = README.split("### One token\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*)", table, re.M))
    found = {name: set(re.findall(r"`(_\w+)`", cell)) for name, cell in rows.items()}
    assert found == {folder.name: kernels for folder in FOLDERS if (kernels := launched(folder, steps=True))}


def test_modules_that_operations_share_are_named_and_those_that_are_named_exist():
    here = {file.name for file in ROOT.glob("*.py")} - {"__init__.py"}
    assert {name for name in here if f"`{name}`" not in README} == set()
    anywhere = {file.name for file in ROOT.rglob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", README)) <= anywhere


def test_words_stand_in_the_kernels():
    """A word that the code no longer uses must leave the page, too."""
    table = README.split("## Words\n")[1].split("\n## ")[0]
    source = "\n".join(file.read_text() for file in ROOT.rglob("*.py"))
    words = [word for cell in re.findall(r"^\| ([^|]*) \|", table, re.M)[2:] for word in re.findall(r"\w+", cell)]
    assert len(words) > 40
    assert [word for word in words if not re.search(rf"\b_?{word}", source)] == []
