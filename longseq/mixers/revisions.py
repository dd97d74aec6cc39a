"""Revisions of mixers: weights are refused if the code has come to compute another function from them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from longseq.blocks.sharding import unsharded_class
from longseq.mixers.base import Mixer
from longseq.mixers.registry import name_of


def mixer_revisions(model: nn.Module) -> dict[str, int]:
    """The revision of each registered mixer in the model, by name."""
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    return {name: mixer.revision for mixer in mixers if (name := name_of(unsharded_class(mixer))) is not None}


def check_revisions(model: nn.Module, saved: Mapping[str, int] | None) -> None:
    """Raise ValueError if a mixer computed another function of its weights when `saved` was recorded.

    Without a record, all mixers count as the first revision.
    """
    for name, revision in mixer_revisions(model).items():
        trained = (saved or {}).get(name, 1)
        if trained != revision:
            raise ValueError(
                f"its {name} layers are of revision {trained}, and this version of longseq computes revision "
                f"{revision}, another function of the same weights: train again, or use the version that wrote it"
            )
