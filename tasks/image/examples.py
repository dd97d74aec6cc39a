"""Evaluated images for people: a choice of them for pictures, and the names of their files."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longseq.tasks.data.labels import rarest_labels
from longseq.tasks.data.loader import IMAGES, TARGETS, find_entry
from longseq.tasks.data.sampler import EvaluationSampler
from longseq.tasks.image.datasets import EvaluationBatches
from longseq.tasks.image.sources import Split
from longseq.tasks.image.transforms import evaluation_transform


def pick_examples(datamodule: Any, count: int) -> tuple[Tensor, Tensor] | None:
    """At most `count` validation images, uint8 [N, C, S, S] as the model is evaluated on them, and their targets.

    They have as many classes as possible, in order, and depend on the data alone: each run shows the same ones. Of a
    stream they are the first ones. None if no image can be read.
    """
    if datamodule.splits is None:
        # Without a default, Lightning would take the end of the stream for that of the validation.
        first = next(iter(datamodule.val_dataloader()), None)
        if isinstance(first, Mapping):
            first = find_entry(first, IMAGES, "images"), find_entry(first, TARGETS, "labels")
        return None if first is None else (first[0][:count], first[1][:count])
    split: Split = datamodule.splits.validation
    classes = split.source.targets()
    known = np.zeros(len(split), dtype=np.int64) if classes is None else rarest_labels(classes[split.indices])
    batches = EvaluationBatches(split, evaluation_transform(datamodule.info), datamodule.info)
    read = ((place, batches[[place]]) for place in stratified_order(known).tolist())
    picked = list(islice(((place, one) for place, one in read if len(one.targets)), count))
    if not picked:
        return None
    ordered = [one for _, one in sorted(picked, key=lambda pair: known[pair[0]])]
    return torch.cat([one.inputs for one in ordered]), torch.cat([one.targets for one in ordered])


def stratified_order(classes: np.ndarray) -> np.ndarray:
    """Places of `classes` [N] in a fixed random order: the n-th of each class stand before the (n + 1)-th of any."""
    shuffled = np.random.default_rng(0).permutation(len(classes))
    by_class = np.argsort(classes[shuffled], kind="stable")
    _, counts = np.unique(classes, return_counts=True)
    turns = np.empty(len(classes), dtype=np.int64)
    turns[by_class] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return shuffled[np.argsort(turns, kind="stable")]


def name_images(datamodule: Any, kind: str, loader: Any, batch: int, size: int) -> list[str]:
    """The names, such as files, of the `size` images of a batch in the evaluation of a split (validation, test).

    Images that have no name, such as those of a stream or of a loader of one's own, are named by their places.
    """
    splits, sampler = getattr(datamodule, "splits", None), getattr(loader, "sampler", None)
    if splits is not None and isinstance(sampler, EvaluationSampler):
        split: Split = getattr(splits, kind)
        unreadable = set(datamodule.unreadable)
        paths = [split.source.path(int(split.indices[place])) for place in sampler.batch(batch)]
        named = [path for path in paths if path not in unreadable]
        if len(named) == size:
            return named
    return [f"batch {batch}, image {row}" for row in range(size)]
