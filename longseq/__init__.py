"""longseq: image and sequence models with recurrent mixers in place of attention.

After `import longseq` timm has the image models: `timm.list_models("longseq_*")`.

    model = longseq.from_pretrained("folder, checkpoint or OWNER/NAME on the hub")
    model.save_pretrained("folder")

`longseq.plugins.load(["my_module"])` imports modules that register mixers, tasks and more (see `longseq.plugins`).

The import takes milliseconds: torch, timm and the modules of longseq are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from longseq.registration import register_with_timm

if TYPE_CHECKING:
    from longseq import plugins
    from longseq.models import from_pretrained, push_to_hub, register_kind, save_pretrained

    __version__: str

register_with_timm()

__all__ = ["from_pretrained", "plugins", "push_to_hub", "register_kind", "save_pretrained"]

_OF_MODELS = ("from_pretrained", "push_to_hub", "register_kind", "save_pretrained")


def __getattr__(name: str) -> Any:
    """`__version__`, the functions of `longseq.models`, and the modules of the package."""
    if name == "__version__":
        return importlib.import_module("longseq.version").installed_version()
    if name in _OF_MODELS:
        return getattr(importlib.import_module("longseq.models"), name)
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"longseq.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"longseq.{name}":
                raise
    raise AttributeError(f"module 'longseq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
