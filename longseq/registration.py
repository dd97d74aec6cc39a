"""Registers the image models with timm right after the program imports timm (which takes seconds), not before."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIANTS = "longseq.backbones.variants"


def register_with_timm() -> None:
    """Register the image models now if timm is imported, else right after its import."""
    if "timm" in sys.modules:
        importlib.import_module(VARIANTS)
    elif not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())


class _TimmFinder:
    """Finds timm as the other finders do, and lets its loader register the models at the end."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "timm":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                importlib.import_module(VARIANTS)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
