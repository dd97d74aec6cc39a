"""Makes `import torchmetrics` load only the parts in use, which saves two seconds of every command.

The whole package also imports scipy, transformers and torchvision's models, for metrics of sound, text and images.
Lightning and we use its base class and the metrics of classification.
"""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class Deferred(ModuleType):
    """A package that runs its own code when it is asked for a name that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer_torchmetrics() -> None:
    """Import torchmetrics such that each part of it loads on first use, unless it is imported already.

    For programs: the commands, and the processes of the tests. A user's script imports the package as it is.
    """
    if "torchmetrics" in sys.modules:
        return
    try:
        package = _place("torchmetrics")
        package.functional = _place("torchmetrics.functional")  # type: ignore[attr-defined]
        # What modules of the package import from it, and Lightning as it is imported.
        package.__version__ = importlib.import_module("torchmetrics.__about__").__version__  # type: ignore[attr-defined]
        package._logger = logging.getLogger("torchmetrics")  # type: ignore[attr-defined]
        importlib.import_module("torchmetrics.utilities")  # before the metrics, which import one another
        package.Metric = importlib.import_module("torchmetrics.metric").Metric  # type: ignore[attr-defined]
        collections = importlib.import_module("torchmetrics.collections")
        package.MetricCollection = collections.MetricCollection  # type: ignore[attr-defined]
    except (ImportError, AttributeError):  # a version that is made otherwise is imported whole
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchmetrics"]:
            del sys.modules[name]


def _place(name: str) -> ModuleType:
    """Put a deferred package into `sys.modules`."""
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(name)
    module = module_from_spec(spec)
    module.__class__ = Deferred
    sys.modules[name] = module
    return module
