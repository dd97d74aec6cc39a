"""The number of parameters of a module, and those that are exempt from weight decay or learn at a rate of their own."""

from torch import nn


def count_parameters(module: nn.Module, *, trainable: bool = False) -> int:
    """Count the parameters of `module`, shared ones once; with `trainable`, only those that require a gradient."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trainable)


def no_weight_decay(module: nn.Module) -> set[str]:
    """Names, relative to `module`, of the parameters that are exempt from weight decay.

    Each part lists them in its class attribute `no_weight_decay_names`, added to those of its base classes. Decay of a
    decay rate or a step size would pull the recurrence towards another memory length. The lists are attributes of
    classes, because copies of a module lose attributes of tensors.
    """
    names = set()
    for prefix, part in module.named_modules():
        listed = (name for kind in type(part).__mro__ for name in vars(kind).get("no_weight_decay_names", ()))
        for name in listed:
            if getattr(part, name, None) is not None:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def learning_rate_scales(module: nn.Module) -> dict[int, float]:
    """By their `id`, the parameters that learn at a multiple of the others' rate, and the multiple.

    Each part has them in its class attribute `learning_rate_scales`, by name.
    """
    scales = ((part, getattr(type(part), "learning_rate_scales", {})) for part in module.modules())
    return {id(getattr(part, name)): scale for part, named in scales for name, scale in named.items()}
