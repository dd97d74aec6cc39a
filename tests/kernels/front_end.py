"""Triton's compiler without its later stages, for processes of their own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import triton_types
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.language.semantic import TritonSemantic
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITCallable


def stop_after_front_end() -> None:
    """Leave out all of compilation after the front end, which finds out whether types and shapes fit.

    Arguments' divisibility by 16, which the front end does not read, is left out as well.
    """
    begin, make_ir, add_stages = ASTSource.__init__, ASTSource.make_ir, CUDABackend.add_stages

    def begin_alike(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.attrs = {}

    def make_nothing(self: Any, *args: Any) -> str:
        make_ir(self, *args)
        return ""

    def add_empty_stages(self: Any, stages: dict[str, Any], *args: Any) -> None:
        add_stages(self, stages, *args)
        stages.update({name: lambda module, metadata: "" for name in stages} | {"cubin": finish})

    def finish(module: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(name="kernel", shared=0)
        return b""

    ASTSource.__init__, ASTSource.make_ir, CUDABackend.add_stages = begin_alike, make_nothing, add_empty_stages
    # A function is parsed once, however many kernels call it and with whatever types.
    JITCallable.parse = functools.cache(JITCallable.parse)
    # Whether integers overflow is computed for an assertion that is left out without `debug`.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    # No other process reads the cache, so a file need not appear there at once.
    FileCacheManager.put = write_in_place
    triton_types.build_types_once()


def write_in_place(cache: FileCacheManager, data: str | bytes, filename: str, binary: bool = True) -> str:
    path = Path(cache.cache_dir, filename)
    path.write_bytes(data if isinstance(data, bytes) else str(data).encode())
    return str(path)
