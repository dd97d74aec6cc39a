"""Kernels compiled in parallel: which launches are skipped, which are compiled, and which threads are not affected."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROCESS = """
import threading
import kernels_alone
import torch, triton, triton.language as tl
from longseq.kernels.compile_ahead import compile_kernels, find_kernels
import absent_gpu

launched = absent_gpu.launched
absent_gpu.activate()


@triton.jit
def double(x, y, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(y + place, 2 * tl.load(x + place))


@triton.jit
def wrong(x, COUNT: tl.constexpr):
    tl.static_assert(COUNT < 0)


x, y, found = torch.ones(64), torch.zeros(64), {}
with find_kernels(found):
    for count in (32, 64, 64):
        double[(1,)](x, y, count)
    wrong[(1,)](x, 32)
    other = threading.Thread(target=lambda: double[(1,)](x, y, 16))
    other.start()
    other.join()
compile_kernels(found, x.device)
assert launched == ["double"], launched  # in the other thread only
assert triton.knobs.runtime.jit_cache_hook is None
for count in (16, 32, 64):
    double[(1,)](x, y, count)
assert launched == ["double"] * 4
try:
    wrong[(1,)](x, 32)
except triton.compiler.CompilationError:
    pass
else:
    raise AssertionError("the launch raises the compiler's error")
"""


@pytest.mark.slow
def test_kernels_are_compiled_before_they_are_launched(tmp_path, monkeypatch):
    (tmp_path / "process.py").write_text(PROCESS)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tests = Path(__file__).parents[1]
    folders = os.pathsep.join(str(x) for x in (tests / "support", tests.parent / "benchmarks"))
    monkeypatch.setenv("PYTHONPATH", folders, prepend=os.pathsep)
    subprocess.run([sys.executable, tmp_path / "process.py"], check=True)
