"""The content of a built package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The files and folders at the top of a checkout, and those that setuptools adds to an sdist.
TOP = {
    *(".ci", ".github", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in"),
    *("README.md", "benchmarks", "conf", "docs", "kernels", "longseq", "pyproject.toml", "tasks", "tests", "tools"),
}
ADDED = {"PKG-INFO", "setup.cfg"}
FOLDERS = {"longseq": "longseq", **{name: f"longseq/{name}" for name in ("conf", "kernels", "tasks", "tools")}}


def list_files(folder: Path) -> set[str]:
    """The files in a folder and below it, without links to folders."""
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def build(folder: Path, kind: str) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.split()[-1]


@pytest.mark.slow
def test_an_sdist_holds_all_of_the_repository_and_its_wheel_only_the_package(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in TOP:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources / name)
    expected = list_files(sources) | ADDED
    packed = {
        f"{target}/{file.relative_to(sources / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (sources / folder).rglob("*")
        if file.suffix in (".py", ".yaml") or file.name == "py.typed"
    }
    with tarfile.open(build(sources, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {name for name in list_files(unpacked) if not name.startswith("longseq.egg-info/")} == expected
    with zipfile.ZipFile(build(unpacked, "wheel")) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(packed)
