"""Kernels compile for every family of GPUs and fit there; this needs Triton's compiler and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Ampere and Ada, then Hopper and Blackwell: each half is compiled by a process of its own.
HALVES = (("8.0", "8.6", "8.9"), ("9.0", "10.0", "12.0"))
CAPABILITIES = sum(HALVES, ())

# Compile launches again up to the allocation of shared memory. The argument has their rows.
LARGEST = """
import json, sys
import compile as compilations
from absent_gpu import SHARED_MEMORY

rows = json.loads(sys.argv[1])
for capability in SHARED_MEMORY:
    here = [row for row in rows if row["capability"] == ".".join(map(str, capability))]
    if not here:
        continue
    launches = compilations.record([capability], sorted({row["op"] for row in here}), 1, {row["call"] for row in here})
    for row in here:
        # Another Triton, or another launch for the same flags, has other keys.
        alike = [x for x in launches if all(x.head[name] == row[name] for name in ("op", "kernel", "call"))]
        launch = next((x for x in alike if x.key == row["key"]), alike[0])
        found = compilations.compile_launch(launch, is_whole=False)
        assert compilations.find_fault(found) is None, found
        assert found["key"] != row["key"] or found["shared"] == row["shared"], (found, row)
print(len(rows))
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Run Python in a process of its own, where kernels are compiled and not interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS), prepend=os.pathsep)

    def run(*arguments: str) -> str:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="module")
def held():
    return json.loads((BENCHMARKS / "compilations.json").read_text())


def test_everything_compiles_and_fits(held, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    compilations = __import__("compile")
    assert held["missing"] == 0
    assert not [(row, fault) for row in held["rows"] if (fault := compilations.find_fault(row)) is not None]
    assert {(row["op"], row["capability"]) for row in held["rows"]} == {
        (op, capability) for op in compilations.list_compiled() for capability in CAPABILITIES
    }


@pytest.mark.slow
@pytest.mark.parametrize("capabilities", HALVES, ids="-".join)
def test_the_largest_launches_compile(held, process, capabilities):
    """For each family of GPUs, the four launches with the most shared memory, each of another kernel: 24 in all.

    The file may be of another version of Triton than the one that is installed.
    """
    rows = []
    for capability in capabilities:
        of_kernel = {}
        for row in held["rows"]:
            best = of_kernel.get(row["kernel"])
            if row["capability"] == capability and (best is None or best["shared"] < row["shared"]):
                of_kernel[row["kernel"]] = row
        rows += sorted(of_kernel.values(), key=lambda row: -row["shared"])[:4]
    assert len(rows) == 4 * len(capabilities)
    assert all(row["shared"] > 32 * 1024 for row in rows)
    assert process("-c", LARGEST, json.dumps(rows)).split() == [str(len(rows))]
