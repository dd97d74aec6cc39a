"""The content of a built package, and that Python in the repository's root finds the whole package, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from sources import ADDED, ROOT, TOP, needs_links

FOLDERS = ("conf", "kernels", "tasks", "tools")  # that stand at the top and install below longseq
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])('.'))"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the repository."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in TOP:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def list_files(folder: Path) -> set[str]:
    """The files in a folder and below it. A link to a folder is none."""
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def unpack_sdist(sources: Path) -> Path:
    """Build an sdist and unpack it beside the sources; the folder of its files."""
    with tarfile.open(build(sources, "sdist")) as archive:
        archive.extractall(sources.with_name("unpacked"), filter="data")
    (unpacked,) = sources.with_name("unpacked").iterdir()
    return unpacked


def build(folder: Path, kind: str) -> Path:
    command = [sys.executable, "-c", BUILD, f"build_{kind}"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.split()[-1]


@pytest.mark.slow
def test_an_sdist_holds_all_of_the_repository(sources: Path) -> None:
    expected = list_files(sources)
    unpacked = unpack_sdist(sources)
    found = {name for name in list_files(unpacked) if not name.startswith("longseq.egg-info/")}
    assert found == expected | ADDED


@pytest.mark.slow
def test_a_wheel_holds_every_file_once_and_only_ours(sources: Path) -> None:
    folders = {"longseq": "longseq"} | {name: f"longseq/{name}" for name in FOLDERS}
    expected = {
        f"{target}/{file.relative_to(sources / folder).as_posix()}"
        for folder, target in folders.items()
        for file in (sources / folder).rglob("*")
        if file.suffix in (".py", ".yaml") or file.name == "py.typed"
    }

    unpacked = unpack_sdist(sources)
    for folder in (sources, unpacked):
        with zipfile.ZipFile(build(folder, "wheel")) as wheel:
            names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert sorted(names) == sorted(expected), folder.name


def run_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    # As for a user: without the variable that keeps the working folder off Python's path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@needs_links
@pytest.mark.slow
def test_python_in_the_root_finds_the_whole_package_there(sources: Path) -> None:
    result = run_in(
        sources,
        "import sys, longseq, longseq.conf, longseq.tasks, longseq.tools, timm\n"
        "assert callable(longseq.from_pretrained)  # imports the models\n"
        "print(timm.is_model('longseq_tiny_patch16_224'), len(longseq.kernels.list_ops()) > 5)\n"
        "ours = [module for name, module in sys.modules.items() if name.split('.')[0] == 'longseq']\n"
        "print(*(module.__file__ for module in ours), sep='\\n')",
    )
    assert result.returncode == 0, result.stderr
    found, *files = result.stdout.splitlines()
    assert found == "True True"
    assert len(files) > 100
    assert all(Path(file).is_relative_to(sources / "longseq") for file in files)
