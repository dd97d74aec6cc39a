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
# Ampere and Ada, then Hopper and Blackwell.
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")

# Compile launches again up to the allocation of shared memory. The argument has their rows.
LARGEST = """
import json, sys
import compile as compilations

for row in json.loads(sys.argv[1]):
    capability = tuple(map(int, row["capability"].split(".")))
    launches = compilations.record([capability], [row["op"]], 1, {row["call"]})
    # Another Triton, or another launch for the same flags, has other keys.
    alike = [x for x in launches if all(x.head[name] == row[name] for name in ("op", "kernel", "call"))]
    launch = next((x for x in alike if x.key == row["key"]), alike[0])
    found = compilations.compile_launch(launch, is_whole=False)
    assert compilations.find_fault(found) is None, found
    assert found["key"] != row["key"] or found["shared"] == row["shared"], (found, row)
"""


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
def test_the_largest_launches_compile(held, tmp_path):
    """Compile the launch with the most shared memory for three families of GPUs, each time of another kernel.

    The file may come from another version of Triton than the installed one.
    """
    rows = {}
    for capability in ("8.0", "9.0", "12.0"):
        compiled = {row["kernel"] for row in rows.values()}
        others = [row for row in held["rows"] if row["capability"] == capability and row["kernel"] not in compiled]
        rows[capability] = max(others, key=lambda row: row["shared"])
    assert all(row["shared"] > 32 * 1024 for row in rows.values())
    # Kernels are compiled in a new process, and not interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join((str(BENCHMARKS), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", LARGEST, json.dumps(list(rows.values()))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
