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
from longseq.kernels.compile_ahead import compile_ahead
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


compiled = []


def before(fn, **launch):
    compiled.append((fn.name, threading.current_thread() is threading.main_thread()))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        double[(1,)](x, y, 256)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, dy):
        double[(1,)](dy, y, 512)
        return torch.zeros_like(dy)


def step():
    leaf = torch.ones(64, requires_grad=True)
    torch.autograd.grad(Double.apply(leaf), leaf, torch.ones(64))


triton.knobs.runtime.jit_cache_hook = before
x, y = torch.ones(64), torch.zeros(64)
with compile_ahead(x.device):
    for count in (32, 64, 64):
        double[(1,)](x, y, count)
    wrong[(1,)](x, 32)
    step()  # a backward pass is compiled ahead, too
    other = threading.Thread(target=lambda: double[(1,)](x, y, 16))
    other.start()
    other.join()
assert launched == ["double"], launched  # that of the other thread
assert triton.knobs.runtime.jit_cache_hook is before
assert not any(is_main for _, is_main in compiled), compiled
compiled.clear()
for count in (16, 32, 64):
    double[(1,)](x, y, count)
step()
assert launched == ["double"] * 6 and not compiled
try:
    wrong[(1,)](x, 32)
except triton.compiler.CompilationError:
    pass
else:
    raise AssertionError("the error is left to the launch")
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
