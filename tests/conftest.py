"""Settings of the whole suite: one thread a process, GPU tests skipped with a reason where there is no GPU."""

from __future__ import annotations

import importlib
import os
from typing import Any

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
    language = importlib.import_module("triton.language")
    del os.environ["TRITON_INTERPRET"]

    # The interpreter puts its functions in the place of the language's when a kernel is launched, and again whenever
    # the kernel calls a function, when all of them stand there already: the search for more takes half of the time.
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch_language = getattr(interpreter, "_patch_lang", None)
    restores_nothing = getattr(interpreter, "_LangPatchScope", lambda: None)  # Triton 3.4 has none

    def patch_language_once(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        patched = seen and not any(language.core.is_builtin(module.load) for module in seen)
        return restores_nothing() if patched else patch_language(function)

    if patch_language is not None:
        interpreter._patch_lang = patch_language_once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def choices_of_this_test() -> None:
    """No choice of a backend that an earlier test has made: tests change what decides."""
    from longseq.kernels.operation import forget

    forget()
