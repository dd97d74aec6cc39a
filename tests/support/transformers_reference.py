"""Modules of transformers with their own torch forms in place of the kernels of other packages."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from fla_reference import in_float64, load


def transformers_module(patch: pytest.MonkeyPatch, family: str, *, double: bool = False) -> Any:
    """The module of a family of models; with `double`, it computes in float64 where it would in float32."""
    module = load(f"transformers.models.{family}.modeling_{family}")
    for function in [value for value in vars(module).values() if inspect.isfunction(value)]:
        # If other packages have a kernel for the function, transformers' own form is wrapped in a choice between them.
        if function.__module__ == module.__name__ and hasattr(function, "__wrapped__"):
            patch.setattr(module, function.__name__, inspect.unwrap(function))
    if double:
        in_float64(patch, module)
    return module
