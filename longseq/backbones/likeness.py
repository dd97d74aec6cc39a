"""Whether two models compute the same function of the same weights."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from longseq.mixers.pattern import expand_pattern, options_by_name

# Arguments that only change the training, and arguments of mixers that only choose initial weights.
TRAINING = ("dropout", "drop_path", "residual_in_float32", "max_length")
INITIAL = ("dt_min", "dt_max")


class Difference(NamedTuple):
    """An argument of `TokenBackbone`, or NAME of a mixer's options, and its values in two models."""

    name: str
    one: Any
    other: Any


def find_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], ignored: Collection[str] = ()
) -> Difference | None:
    """The first argument that makes two models compute different functions, from their saved arguments; or None."""
    left_out = {*TRAINING, *ignored, *(("mlp_ratio", "mlp_bias") if one["mlp"] is other["mlp"] is None else ())}
    for name in one:
        if name in left_out or name == "mixer_options" or one[name] == other[name]:
            continue
        if name != "mixer" or _layers(one) != _layers(other):  # different patterns can give the same layers
            return Difference(name, one[name], other[name])
    its = options_by_name(other["mixer"], other["mixer_options"])
    for mixer, options in options_by_name(one["mixer"], one["mixer_options"]).items():
        for name, value in options.items():
            if name not in INITIAL and value != its[mixer][name]:
                return Difference(f"{name} of {mixer}", value, its[mixer][name])
    return None


def _layers(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return expand_pattern(arguments["mixer"], arguments["depth"])
