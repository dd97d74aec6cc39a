"""The kernels of a process without a GPU are emulated, whichever test imports them first."""

import os

import emulation
import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here")
def test_kernels_that_a_test_imports_without_the_variable_are_emulated():
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import KernelInterface

    assert "TRITON_INTERPRET" not in os.environ
    kernels = {
        f"{module.__name__}.{name}": type(value)
        for module in emulation.list_kernel_modules()
        for name, value in vars(module).items()
        if isinstance(value, KernelInterface)
    }
    assert len(kernels) > 100
    assert set(kernels.values()) == {InterpretedFunction}
