"""Token mixers, registered by name: `create("deltanet", d_model=192)`, `mixer_names()`.

To add a mixer, subclass `Mixer` in a file of its own, decorate it with `@register("name")` and import its module here.
Commands (`mixer=name`), the contract tests, image models, export and `longseq describe` then include it.
"""

from longseq.mixers import (  # noqa: F401 - importing a module registers its mixers
    abc,
    attention,
    baseconv,
    based,
    comba,
    delta_product,
    deltanet,
    gated_deltanet,
    gla,
    gsa,
    hgrn2,
    hyena,
    kda,
    lattice,
    linear_attention,
    longhorn,
    longhorn_exact,
    mamba,
    mamba2,
    mamba3,
    retnet,
    rg_lru,
    rwkv4,
    rwkv6,
    rwkv7,
    supra,
    ttt,
    vla,
    window_attention,
)
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
