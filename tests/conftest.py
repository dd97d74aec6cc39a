"""Settings of the whole suite: one thread a process, GPU tests skipped with a reason where there is no GPU."""

from __future__ import annotations

import importlib
import os

# Set before torch is imported anywhere: the suite runs one process a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The suite compares the kernels with float64 itself, and more of them.
os.environ.setdefault("LONGSEQ_SELF_TEST", "0")

import pytest
import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton decides at its import whether its own functions are emulated, and each kernel of ours when it is imported,
    # in the tests that set the variable again. Elsewhere in the suite `auto` must not choose the emulation.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
