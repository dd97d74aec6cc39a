"""Loaders that are not ours, and their batches: pairs, and dictionaries with the names that other libraries give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What other libraries call the images and the targets of a batch.
IMAGES = ("images", "image", "pixel_values", "img", "x")
TARGETS = ("labels", "label", "targets", "target", "y")


def given_loader(datamodule: Any, name: str, label: str) -> Any:
    """The loader that the function `name` of a user's data module returns; `label` is the module's name.

    ValueError for several, or one without a batch.
    """
    loader = getattr(datamodule, name)()
    if isinstance(loader, Mapping | list | tuple):
        raise ValueError(f"{label}.{name} must return one loader")
    try:
        batches = len(loader)
    except TypeError:  # of a stream
        return loader
    if not batches:
        raise ValueError(f"{label}.{name} returns a loader without a batch")
    return loader


def find_entry(batch: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    """The value of the first of `names` that a batch has. KeyError if it has none of them."""
    for name in names:
        if name in batch:
            return batch[name]
    raise KeyError(f"a batch has no {what}, such as {names[0]!r}")


def as_pair(batch: Any, what: str) -> tuple[Any, Any]:
    """The two parts of a batch that is a tuple or a list. ValueError for another one."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(f"a batch must be ({what}) or a dictionary of them")
    return batch[0], batch[1]


def likeliest_classes(targets: Tensor) -> Tensor:
    """Class numbers `[B]`, of probabilities of the classes `[B, C]` the most probable ones."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets


def check_class_numbers(targets: Tensor, num_classes: int) -> None:
    """ValueError for labels `[B]` that are no numbers of classes; floats may be whole numbers."""
    fits = (
        (targets >= 0) & (targets < num_classes) & (targets == targets.round() if targets.is_floating_point() else True)
    )
    if not bool(fits.all()):
        raise ValueError(f"the label {float(targets[~fits][0]):g} is not among the classes 0 to {num_classes - 1}")


def check_several_labels(targets: Tensor, *, exact: bool) -> None:
    """ValueError for labels `[B, C]` that are not 0 and 1; unless `exact` they may lie between these."""
    fits = (targets >= 0) & (targets <= 1)
    if exact:
        fits &= targets == targets.round()
    if not bool(fits.all()):
        raise ValueError(f"a label of a batch is {float(targets[~fits][0]):g}, and must be 0 or 1")


def read_mask(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """True at the real tokens of a padded batch `[N, T]`, from `attention_mask`; without it all are.

    ValueError for a mask of another shape.
    """
    if batch.get("attention_mask") is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    mask: Tensor = batch["attention_mask"].bool()
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask {list(mask.shape)} must have the shape {list(tokens.shape)}")
    return mask


def begins_with_tokens(mask: Tensor) -> bool:
    """True if each row of a mask `[N, T]` has its tokens first and padding behind them."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def read_right_mask(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """As `read_mask`; ValueError also for rows that do not begin with their tokens."""
    mask = read_mask(batch, tokens)
    if not begins_with_tokens(mask):
        raise ValueError("attention_mask: rows must begin with their tokens: use padding_side='right'")
    return mask
