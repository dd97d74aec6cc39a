"""What a built package carries: every folder below `longseq`, and no bare name that another project owns."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_wheel_holds_every_file_and_only_ours(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    folders = {"longseq": "longseq"} | {name: f"longseq/{name}" for name in ("conf", "kernels", "tasks", "tools")}
    for name in folders:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "from setuptools import build_meta; print(build_meta.build_wheel('.'))"]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(source / result.stdout.split()[-1]) as wheel:
        packed = set(wheel.namelist())

    assert {name.split("/")[0] for name in packed if ".dist-info/" not in name} == {"longseq"}
    for folder, target in folders.items():
        for file in (source / folder).rglob("*"):
            if file.suffix in (".py", ".yaml") or file.name == "py.typed":
                assert f"{target}/{file.relative_to(source / folder).as_posix()}" in packed
