"""The stack of residual blocks that image and token models share."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from longseq.blocks.channel_mixing import ChannelMixing7
from longseq.blocks.residual import Block
from longseq.mixers import Mixer, make_reading
from longseq.mixers.pattern import Pattern, expand_pattern, options_by_name
from longseq.models import RUN_ARGUMENTS

BlockT = TypeVar("BlockT", bound=Block[Any])


def build_blocks(
    kind: Callable[..., BlockT],
    depth: int,
    d_model: int,
    *,
    mixer: Pattern,
    mixer_options: Mapping[str, Any] | None,
    direction: str,
    share_directions: str,
    merge: str,
    backend: str,
    make_norm: Callable[[], nn.Module],
    make_mlp: Callable[[], nn.Module] | None,
    drop_path: float,
    recompute: str,
) -> list[BlockT]:
    """Build the blocks of a model from its options.

    Args:
        kind: the class of the blocks, or a function that makes one from the same arguments.
        make_norm, make_mlp: make a norm, and an MLP where blocks have one.
        drop_path: of the last block, growing linearly from 0.

    Raises:
        ValueError: an option has a value that does not exist or contradicts another.
    """
    names = expand_pattern(mixer, depth)
    options = options_by_name(mixer, mixer_options)
    blocks = []
    for index, rate in enumerate(torch.linspace(0, drop_path, depth, device="cpu").tolist()):
        name = names[index]
        reading = make_reading(
            name,
            d_model,
            options=options[name],
            direction=direction,
            # Counted for each mixer: else all layers of one mixer in a hybrid could alternate to the same direction.
            layer=names[:index].count(name),
            share=share_directions,
            merge=merge,
            backend=backend,
        )
        for module in reading.modules():
            if isinstance(module, Mixer):
                module.recompute = recompute == "mixer"
                module.place_in_model(names[:index].count(name), names.count(name))
        mlp, mlp_norm = (None, None) if make_mlp is None else (make_mlp(), make_norm())
        if isinstance(mlp, ChannelMixing7):
            mlp.place_in_model(index, depth)
        blocks.append(kind(reading, make_norm(), mlp=mlp, mlp_norm=mlp_norm, drop_path=rate))
    return blocks


def mixer_options_of(
    pattern: Any, given: Mapping[str, Any] | None, layers: nn.ModuleList | nn.Sequential, without: Any = ()
) -> dict[str, Any]:
    """The complete options of the mixers in a stack of layers, in the form of a model's `mixer_options`.

    Options that are `given` for mixers without a layer are kept.
    """
    options = options_by_name(pattern, given)
    left_out = ("d_model", *RUN_ARGUMENTS, *without)
    for name, layer in zip(expand_pattern(pattern, len(layers)), layers, strict=True):
        mixer = next(part for part in layer.modules() if isinstance(part, Mixer))
        options[name] = {key: value for key, value in mixer.arguments.items() if key not in left_out}
    return options if len(options) > 1 else next(iter(options.values()))
