"""The kernels of a process without a GPU are emulated, whichever test imports them first."""

import importlib.util
import itertools
import operator
import os
import sys

import emulation
import pytest
import torch
import triton_operators

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402


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


WORK = []


def run_work():
    WORK[0]()


OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.and_, operator.or_),
]
NUMBERS = (3, -2, 0, 0.5, -0.0, float("nan"), 2**31, True)


def make_values(dtype, numbers, scalar):
    block = numbers.to(dtype) if dtype != tl.int1 else numbers > scalar
    return [block[None, :], block[:, None], tl.full([], scalar, tl.int32).to(dtype), block]


def operate_on_all_types():
    """What each operator gives when it meets two types, and what it gives for other values of them then."""
    first, later, found = [], [], []
    for dtype in (tl.float32, tl.int32, tl.int64, tl.int1, tl.float64, tl.float16, tl.bfloat16, tl.uint32):
        kept = slice(3) if len(first) < 12 else slice(1)
        first += make_values(dtype, tl.arange(0, 4) + 1, 2)[kept]
        later += make_values(dtype, 5.0 * tl.arange(0, 4) - 7.0, -3)[kept]
    square = 4.0 * tl.arange(0, 4)[:, None] + tl.arange(0, 4)[None, :]
    first, later = [*first, square], [*later, tl.trans(square)]  # in another order of memory
    values = list(zip(first, later, strict=True))
    numbers = [(number, number) for number in NUMBERS]
    pairs = [
        *itertools.product(values, values),
        *itertools.product(values, numbers),
        *itertools.product(numbers, values),
    ]
    calls = [(function, left, right) for function in OPERATORS for left, right in pairs]
    calls += [(lambda x, dtype: x.to(dtype), x, (y[0].dtype,) * 2) for x, y in itertools.product(values, values)]
    calls += [(operator.getitem, x, (slices,) * 2) for x in values for slices in triton_operators.WIDENINGS]
    for function, left, right in calls:
        try:
            results = [function(*operands) for operands in zip(left, right, strict=True)]
        except Exception as error:  # as in the interpreter
            found.append(type(error))
            continue
        for x in results:
            data = x.handle.data
            found.append(
                (str(x.type), str(x), str(x.handle.dtype), data.dtype, data.shape, data.strides, data.tobytes())
            )
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that are divided by zero
def test_operators_give_what_those_of_the_interpreter_give(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel, found = triton.jit(run_work), []
    monkeypatch.setattr(sys.modules[__name__], "WORK", [lambda: found.append(operate_on_all_types())])
    kernel[(1,)]()
    with monkeypatch.context() as patch:
        patch.setattr(triton_operators.Rules, "quicken", lambda self, name, slow: slow)
        kernel[(1,)]()
    quick, slow = found
    assert len([found for found in quick if type(found) is tuple]) > 3000
    assert quick == slow
