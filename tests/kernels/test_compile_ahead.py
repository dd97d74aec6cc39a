"""Kernels that are compiled in several threads."""

from __future__ import annotations

import time
from typing import ClassVar

import torch

from longseq.kernels.compile_ahead import compile_kernels


class Compiled:
    """A compiled kernel whose launcher, like Triton's, comes out of the one module that Python keeps for all of them.

    The module holds the launcher that was loaded last, and each is read from it a moment after it was loaded.
    """

    module: ClassVar[dict[str, str]] = {}
    built: ClassVar[set[str]] = set()

    def __init__(self, name: str) -> None:
        self.name, self.launcher = name, ""

    @property
    def run(self) -> str:
        if not self.launcher:
            self.module["launch"] = self.name
            self.built.add(self.name)
            time.sleep(0.01)
            self.launcher = self.module["launch"]
        return self.launcher


class Kernel:
    def __init__(self, name: str) -> None:
        self.compiled = Compiled(name)

    def preload(self, specialization: str) -> Compiled:
        if specialization == "broken":
            raise RuntimeError("it does not compile")
        return self.compiled


def test_each_kernel_gets_its_own_launcher() -> None:
    names = [f"kernel {index}" for index in range(32)]
    kernels = [Kernel(name) for name in names]
    specializations = ["broken", *[""] * 31]
    found = dict(zip(names, zip(kernels, specializations, strict=True), strict=True))
    compile_kernels(found, torch.device("cpu"))
    assert [kernel.compiled.launcher for kernel in kernels] == ["", *names[1:]]
    assert Compiled.built == set(names[1:])
