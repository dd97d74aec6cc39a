"""The kernels of a process without a GPU are emulated, whichever test imports them first."""

import importlib.util
import os
import sys

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
        if isinstance(value, (KernelInterface, InterpretedFunction))  # none is the other up to Triton 3.5
    }
    assert len(kernels) > 100
    assert set(kernels.values()) == {InterpretedFunction}


def test_types_that_are_built_once_are_those_of_triton(monkeypatch):
    from triton.language import core

    spec = importlib.util.spec_from_file_location("triton.language.core_as_installed", core.__file__)
    installed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, installed)  # dataclasses look for it there
    spec.loader.exec_module(installed)
    for sizes in ([4], [16, 32], [2, 8, 4]):
        ours, theirs = (
            module.block_type(module.pointer_type(module.float32), list(map(module.constexpr, sizes)))
            for module in (core, installed)
        )
        for one, other in ((ours, theirs), (ours.with_element_ty(core.int8), theirs.with_element_ty(installed.int8))):
            assert (one.name, one.mangle(), one.numel) == (other.name, other.mangle(), other.numel)
            assert one.shape.values == other.shape.values == sizes
            one, other = core.tensor(None, one), installed.tensor(None, other)
            assert [size.value for size in one.shape] == [size.value for size in other.shape] == sizes
            assert (str(one), one.numel.value, one.dtype.name) == (str(other), other.numel.value, other.dtype.name)
    scalar = core.tensor(None, core.float32)
    assert (len(scalar.shape), scalar.numel.value, str(scalar)) == (0, 1, "fp32[]")
    for sizes, error in (([], TypeError), ([3], ValueError), ([16.0], TypeError), ([2**21], ValueError)):
        with pytest.raises(error):
            core.block_type(core.float32, sizes)
