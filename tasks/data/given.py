"""Loaders that are not ours, and their batches: pairs, and dictionaries with the names that other libraries give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What other libraries call the images and the targets of a batch.
IMAGES = ("images", "image", "pixel_values", "img", "x")
TARGETS = ("labels", "label", "targets", "target", "y")


def given_loader(datamodule: Any, name: str, label: str) -> Any:
    """The loader that the function `name` of a user's data module returns; `label` is the module's name.

    ValueError, in one line, for none, several or one without a batch.
    """
    loader = getattr(datamodule, name)()
    if isinstance(loader, Mapping | list | tuple) or not isinstance(loader, Iterable):
        kind = "several loaders" if isinstance(loader, Mapping | list | tuple) else f"{type(loader).__name__}"
        raise ValueError(f"{label}.{name} returns {kind}, and one loader is needed: return a DataLoader")
    try:
        batches = len(loader)  # type: ignore[arg-type]
    except TypeError:  # of a stream
        return loader
    if not batches:
        raise ValueError(
            f"{label}.{name} returns a loader without a batch: give its data set samples, or with drop_last=True at "
            "least as many as a batch has"
        )
    return loader


def find_entry(batch: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    """The value of the first of `names` that a batch has. ValueError, in one line, if it has none of them."""
    name = next((name for name in names if name in batch), None)
    if name is None:
        raise ValueError(
            f"a batch with the keys {', '.join(map(str, batch))} has no {what}: call them {names[0]}, or override "
            "read_batch of the module"
        )
    return batch[name]


def as_pair(batch: Any, what: str) -> tuple[Any, Any]:
    """The two parts of a batch that is a tuple or a list. ValueError, in one line, for another one."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f"a batch is a {type(batch).__name__}{size}, and ({what}) or a dictionary of them is needed: change the "
            "loader, or override read_batch of the module"
        )
    return batch[0], batch[1]


def likeliest_classes(targets: Tensor) -> Tensor:
    """Class numbers `[B]`, of probabilities of the classes `[B, C]` the most probable ones."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets


def check_class_numbers(targets: Tensor, num_classes: int) -> None:
    """ValueError, in one line, for labels `[B]` that are no numbers of classes; floats may be whole numbers."""
    if targets.is_floating_point() and not bool((whole := targets.isfinite() & (targets == targets.round())).all()):
        raise ValueError(
            f"the label {float(targets[~whole][0]):g} is no number of a class: give whole numbers, or "
            f"[B, {num_classes}] of probabilities to an image classifier"
        )
    if not targets.numel():
        return
    least, most = int(targets.min()), int(targets.max())
    if least < 0 or most >= num_classes:
        raise ValueError(
            f"the label {least if least < 0 else most} is not among the classes 0 to {num_classes - 1}: "
            "correct it, or give another num_classes"
        )


def check_several_labels(targets: Tensor, *, exact: bool) -> None:
    """ValueError, in one line, for labels `[B, C]` that are not 0 and 1; unless `exact` they may lie between these."""
    fits = (targets >= 0) & (targets <= 1)
    if exact:
        fits &= targets == targets.round()
    if not bool(fits.all()):
        raise ValueError(
            f"a label of a batch is {float(targets[~fits][0]):g}: several labels a sample are 1 where the sample has "
            "the label, and 0 where it has not"
        )


def read_mask(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """True at the real tokens of a padded batch `[N, T]`, from `attention_mask`; without it all are.

    ValueError, in one line, for a mask of another shape.
    """
    if batch.get("attention_mask") is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    mask: Tensor = batch["attention_mask"].bool()
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask has the shape {list(mask.shape)} and the tokens {list(tokens.shape)}: give one of their "
            "shape, 1 at real tokens"
        )
    return mask


def begins_with_tokens(mask: Tensor) -> bool:
    """True if each row of a mask `[N, T]` has its tokens first and padding behind them."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def read_right_mask(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """As `read_mask`; ValueError, in one line, also for rows that do not begin with their tokens."""
    mask = read_mask(batch, tokens)
    if not begins_with_tokens(mask):
        raise ValueError(
            "attention_mask: rows must begin with their tokens, and padding follows: set padding_side='right' in the "
            "tokenizer"
        )
    return mask
