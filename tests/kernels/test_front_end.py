"""All kernels pass Triton's front end, which the interpreter skips: types and shapes fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROCESS = """
import gc, importlib, os, pkgutil, sys

os.environ |= {"LONGSEQ_SELF_TEST": "0", "TRITON_CACHE_DIR": sys.argv[1]}
os.environ.pop("TRITON_INTERPRET", None)

import kernels_alone
import front_end
import torch
from longseq import kernels
from longseq.kernels import dispatch, self_test, triton_launch
import absent_gpu
from triton import knobs

absent_gpu.activate()
front_end.stop_after_front_end()
knobs.language.default_fp_fusion = False  # as of Triton 3.10
begin = absent_gpu.Launcher.__init__


def begin_fused(self, source, metadata):
    fused = metadata.name not in triton_launch.UNFUSED
    assert metadata.enable_fp_fusion == fused, "a launch leaves the fusion of products and sums to Triton's default"
    begin(self, source, metadata)


absent_gpu.Launcher.__init__ = begin_fused
for module in pkgutil.walk_packages(kernels.__path__, "longseq.kernels."):
    if module.name.split(".")[-1].startswith("triton_"):
        importlib.import_module(module.name)
# Kernels are emulated or compiled as they are imported, calls accepted for CPU tensors as they are made.
os.environ["TRITON_INTERPRET"] = "1"

gc.freeze()
gc.set_threshold(20_000, 20, 20)
failed = []
for op, trial in self_test.TRIALS.items():
    calls = {(case.options.get("reverse", False), bool(case.bounds), case.kind) for case in trial.cases}
    # Packed and from the end, where there are several ways of reading: the table of compiled launches has the others.
    tests = [(op, *call) for call in sorted(calls, key=str) if len(calls) == 1 or call[:2] == (True, True)]
    if f"{op}_step" in dispatch._STEPS:
        tests.append((f"{op}_step", False, False, ""))
    for name, reverse, packed, kind in tests:
        if "triton" not in [backend.name for backend in dispatch.backends(name)]:
            continue
        test = self_test._Test(
            name, torch.bfloat16, torch.device("cpu"), reverse, False, packed, kind, dict(trial.widths)
        )
        for check in self_test._list_checks(test):
            before = len(absent_gpu.launched)
            try:
                check.run("triton")
                assert len(absent_gpu.launched) > before, "no kernel was launched"
            except Exception as error:
                failed.append(f"{name}, {check.name}: {type(error).__name__}: {error}")
gc.unfreeze()
assert not failed, "\\n".join(failed)
print(len(absent_gpu.launched))
"""


@pytest.mark.slow
def test_kernels_of_all_self_tests_pass_the_front_end(tmp_path, monkeypatch):
    (tmp_path / "process.py").write_text(PROCESS)
    here = Path(__file__).parent
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(str(x) for x in (here, here.parent / "support", here.parents[1] / "benchmarks")),
        prepend=os.pathsep,
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "process.py", tmp_path / "cache"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert int(done.stdout) > 400
