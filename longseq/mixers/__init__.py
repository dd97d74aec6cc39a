"""Token mixers, registered by name: `create("deltanet", d_model=192)`, `mixer_names()`.

One mixer a file. To add one, subclass `Mixer`, decorate it with `@register("name")`, import its module here and write
`conf/mixer/name.yaml`; contract tests, image models, export and `longseq describe` then cover it.
"""

from longseq.mixers import attention, deltanet, linear_attention, longhorn, longhorn_exact, mamba
from longseq.mixers.base import Mixer
from longseq.mixers.registry import create, get, mixer_names, options, register

__all__ = [
    "Mixer",
    "attention",
    "create",
    "deltanet",
    "get",
    "linear_attention",
    "longhorn",
    "longhorn_exact",
    "mamba",
    "mixer_names",
    "options",
    "register",
]
