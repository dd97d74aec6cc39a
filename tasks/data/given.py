"""Loaders that are not ours, and their batches: pairs, and dictionaries with the names that other libraries give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What other libraries call the images and the targets of a batch.
IMAGES = ("images", "image", "pixel_values", "img", "x")
TARGETS = ("labels", "label", "targets", "target", "y")


def find_entry(batch: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    """The value of the first of `names` that a batch has. KeyError if it has none of them."""
    for name in names:
        if name in batch:
            return batch[name]
    raise KeyError(f"a batch without {what}")


def likeliest_classes(targets: Tensor) -> Tensor:
    """Class numbers `[B]`, of probabilities of the classes `[B, C]` the most probable ones."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets


def check_class_numbers(targets: Tensor, num_classes: int) -> None:
    """ValueError for labels `[B]` that are no numbers of classes; floats may be whole numbers."""
    fits = (targets >= 0) & (targets < num_classes)
    if targets.is_floating_point():
        fits &= targets == targets.round()
    if not bool(fits.all()):
        raise ValueError(f"the label {float(targets[~fits][0]):g} is not among the classes 0 to {num_classes - 1}")


def check_several_labels(targets: Tensor, *, exact: bool) -> None:
    """ValueError for labels `[B, C]` that are not 0 and 1; unless `exact` they may lie between these."""
    fits = (targets >= 0) & (targets <= 1)
    if exact:
        fits &= targets == targets.round()
    if not bool(fits.all()):
        raise ValueError(f"a label of a batch is {float(targets[~fits][0]):g}, and neither 0 nor 1")


def read_mask(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """True at the real tokens of a padded batch `[N, T]`, from `attention_mask`; without it all are.

    ValueError for a mask of another shape.
    """
    if batch.get("attention_mask") is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    mask: Tensor = batch["attention_mask"].bool()
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask {list(mask.shape)} does not fit the tokens {list(tokens.shape)}")
    return mask


def begins_with_tokens(mask: Tensor) -> bool:
    """True if each row of a mask `[N, T]` has its tokens first and padding behind them."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())
