"""Token mixers, registered by name: `create("deltanet", d_model=192)`, `mixer_names()`.

To add a mixer, subclass `Mixer` in a file of its own in this folder, and decorate it with `@register("name")`. Commands
(`mixer=name`), the contract tests, image models, export and `longseq describe` then include it.
"""

import importlib
import pkgutil

from longseq.mixers.base import Mixer, ScanOptions
from longseq.mixers.cards import MixerCard, list_mixers
from longseq.mixers.contract import LAWS, ContractError, check
from longseq.mixers.directions import Directions, make_reading, named_readings
from longseq.mixers.registry import create, get, mixer_names, options, register

__all__ = [
    "LAWS",
    "ContractError",
    "Directions",
    "Mixer",
    "MixerCard",
    "ScanOptions",
    "check",
    "create",
    "get",
    "list_mixers",
    "make_reading",
    "mixer_names",
    "named_readings",
    "options",
    "register",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")  # registers the mixers of the module
