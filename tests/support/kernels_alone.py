"""Imported first: a process has `longseq.kernels` without `longseq`, whose import of timm takes three seconds."""

import importlib.util
import sys
import types

_spec = importlib.util.find_spec("longseq")
assert _spec is not None
assert _spec.submodule_search_locations is not None
_package = types.ModuleType("longseq")
_package.__path__ = list(_spec.submodule_search_locations)
sys.modules["longseq"] = _package
