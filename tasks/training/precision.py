"""The precisions in which a run computes its numbers."""

from __future__ import annotations

from torch import nn

# Lightning's precisions that keep the weights, and with them its sums and averages, in half precision.
HALF_WEIGHTS = ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")


def refuse_half_weights(precision: object, key: str = "precision") -> None:
    """Raise ValueError for weights in half precision.

    An update of less than 1/256 of a weight is lost in bfloat16, an average of weights stands still, and a metric's
    sum of samples stops at 256. Mixed precision computes as fast, and keeps all three in float32.
    """
    if precision in HALF_WEIGHTS:
        mixed = "16-mixed" if precision == "16-true" else "bf16-mixed"
        raise ValueError(
            f"{key}={precision} keeps weights and metrics in half precision, in which small updates and the counts of "
            f"a metric are lost: give {key}={mixed}, which computes in it and keeps them in float32"
        )


def widen_weights(module: nn.Module, precision: object) -> None:
    """Make the weights float64 for precision=64-true before a checkpoint is read into them; Lightning does it later."""
    if precision == "64-true":
        module.double()
