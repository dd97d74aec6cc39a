"""A fork of this process can do what a program can, whatever tests ran before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked import start_fork
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks do not differentiate once there is a GPU")
def test_a_fork_differentiates_after_tensors_without_values_of_a_gpu(tmp_path: Path):
    with FakeTensorMode():
        torch.ones(1, device="cuda")  # from here on, torch counts one GPU
    differentiate()
    process = start_fork([], tmp_path, run=differentiate)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def differentiate() -> None:
    x = torch.ones(1, requires_grad=True)
    x.square().backward()
    assert x.grad == 2
