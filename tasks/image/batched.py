"""The parameters of a batch of images, from those of its samples, and what replaces erased pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longseq.kernels.image_transforms.parameters import KINDS, NUMBERS, Geometries, ImageSteps
from longseq.tasks.image.draws import Draw

_CODES = {kind: code for code, kind in enumerate(KINDS)}


class Draws(NamedTuple):
    """The parameters of a batch. Geometries are of the samples in `resized`, which come as images of any size; the
    others are cropped already. `erased` numbers the samples with erased pixels: `where` bool [K, S, S], and `values`
    of all of them in a row."""

    geometries: Geometries
    resized: list[int]
    steps: ImageSteps
    erased: list[int]
    where: Tensor
    values: Tensor

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.steps.kinds.shape[1]


def stack_draws(draws: Sequence[Draw], size: int) -> Draws:
    """The parameters of a batch from those of its samples."""
    resized = [number for number, draw in enumerate(draws) if draw.geometry is not None]
    geometries = [draw.geometry for draw in draws if draw.geometry is not None]
    places = np.array([[g.rows, g.columns] for g in geometries], dtype=np.int16).reshape(-1, 2, size)
    erased = [(number, draw.erased) for number, draw in enumerate(draws) if draw.erased is not None]
    where = np.stack([one.where for _, one in erased]) if erased else np.zeros((0, size, size), dtype=bool)
    values = np.concatenate([one.values for _, one in erased]) if erased else np.zeros(0, dtype=np.uint8)
    return Draws(
        Geometries(
            torch.tensor([g.box for g in geometries], dtype=torch.int32).view(-1, 4),
            torch.tensor([g.resized for g in geometries], dtype=torch.int32).view(-1, 2),
            torch.from_numpy(places[:, 0].copy()),
            torch.from_numpy(places[:, 1].copy()),
        ),
        resized,
        _stack_steps(draws),
        [number for number, _ in erased],
        torch.from_numpy(where),
        torch.from_numpy(values),
    )


def _stack_steps(draws: Sequence[Draw]) -> ImageSteps:
    shape = max((len(draw.steps) for draw in draws), default=0), len(draws)
    kinds = np.zeros(shape, dtype=np.int32)
    values = np.zeros((*shape, NUMBERS))
    tables = np.zeros((*shape, 256), dtype=np.uint8)
    for number, draw in enumerate(draws):
        for turn, step in enumerate(draw.steps):
            kinds[turn, number] = _CODES[step.kind]
            values[turn, number, : len(step.values)] = step.values
            if step.table:
                tables[turn, number] = np.frombuffer(step.table, dtype=np.uint8)
    return ImageSteps(torch.from_numpy(kinds), torch.from_numpy(values), torch.from_numpy(tables))


def erase(images: Tensor, draws: Draws) -> None:
    """Replace the erased pixels in place, uint8 [B, C, S, S]."""
    if draws.erased:
        numbers = torch.tensor(draws.erased, device=images.device)
        chosen = images[numbers]
        where = draws.where.to(images.device)[:, None].expand_as(chosen)
        images[numbers] = chosen.masked_scatter_(where, draws.values.to(images.device))
