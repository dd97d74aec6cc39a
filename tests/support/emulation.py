"""Triton's interpreter, which emulates the kernels where there is no GPU, without work that changes no result."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pkgutil
from types import ModuleType
from typing import Any

import numpy as np
import triton_operators
import triton_types


def import_triton() -> None:
    """Import Triton and our kernels so that they are emulated, which Triton decides when a kernel is imported.

    All kernels are imported here, in a fifth of a second, so that no test depends on which test imported a kernel
    first. `auto` chooses the emulation only in tests that set TRITON_INTERPRET.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    language = importlib.import_module("triton.language")
    list_kernel_modules()
    del os.environ["TRITON_INTERPRET"]
    interpreter = importlib.import_module("triton.runtime.interpreter")
    _call_functions_directly(interpreter, language)
    _patch_language_once(interpreter, language)
    _leave_out_overflow(interpreter)
    _trust_arrays(interpreter)
    _look_up_types_once(interpreter, language)
    _build_types_once(interpreter, language)
    _make_bfloat16_constants(interpreter, language)
    triton_types.build_types_once()


def list_kernel_modules() -> list[ModuleType]:
    """The modules of our Triton kernels."""
    packages = pkgutil.walk_packages(importlib.import_module("longseq.kernels").__path__, "longseq.kernels.")
    names = [package.name for package in packages if package.name.split(".")[-1].startswith("triton_")]
    return [importlib.import_module(name) for name in names]


def _call_functions_directly(interpreter: Any, language: Any) -> None:
    """Call a function of the language without the wrapper that asks whether its semantics were given."""
    wrapper = language.core.builtin(lambda: None).__code__
    rules = triton_operators.Rules(interpreter, language.core)

    def patch(module: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        if module is language.core.tensor and name in rules.kept:
            call = rules.quicken(name, call)
        if scope:
            scope[0].set_attr(module, name, call)
        else:  # up to Triton 3.5
            setattr(module, name, call)

    interpreter._patch_attr = patch


def _patch_language_once(interpreter: Any, language: Any) -> None:
    """Search a kernel for functions of the language only when those are not the interpreter's yet.

    The interpreter puts its functions in the place of the language's when a kernel is launched, and again whenever the
    kernel calls a function, when all of them stand there already.
    """
    patch_language, is_builtin = interpreter._patch_lang, language.core.is_builtin

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if "found" not in self.__dict__:
            seen = [value for value in self.fn.__globals__.values() if value is language or value is language.core]
            self.found = (self.rewrite(), seen)
        function, seen = self.found
        if not seen or any([is_builtin(module.load) for module in seen]):
            patch_language(self.fn)
        try:
            return function(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _leave_out_overflow(interpreter: Any) -> None:
    """Do not compute whether sums and products of integers overflow: without `debug`, nothing reads the answer."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _trust_arrays(interpreter: Any) -> None:
    """Do not compare the size of each array with that of its type: only a result of wider numbers needs the search."""

    def begin(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr

    handle, compute = interpreter.TensorHandle, interpreter.InterpreterBuilder.binary_op
    handle.__init__ = begin

    def compute_directly(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        left = lhs.data
        if left.dtype.kind != "b":
            output = op(left, rhs.data)
            if output.itemsize <= left.itemsize:
                return handle(output, lhs.dtype.scalar)
        return compute(self, lhs, rhs, op)

    interpreter.InterpreterBuilder.binary_op = compute_directly


def _look_up_types_once(interpreter: Any, language: Any) -> None:
    """NumPy's type for a type of Triton: the interpreter builds a table of all of them for each operation."""
    find = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: find(language.uint64 if type.scalar.is_ptr() else type.scalar)


def _build_types_once(interpreter: Any, language: Any) -> None:
    """The builder's type for a type of block."""
    build = language.core.block_type.to_ir

    def build_once(self: Any, builder: Any) -> Any:
        if builder is not interpreter.interpreter_builder:
            return build(self, builder)
        if "built" not in self.__dict__:
            self.built = build(self, builder)
        return self.built

    language.core.block_type.to_ir = build_once


def _make_bfloat16_constants(interpreter: Any, language: Any) -> None:
    """Numbers that meet values in bfloat16, rounded as casts are: the emulation of Triton 3.8 and before has none."""
    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "get_bf16"):
        return

    def make(self: Any, value: float) -> Any:
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), language.float32)
        return self.create_fp_trunc(handle, language.bfloat16)

    builder.get_bf16 = make
