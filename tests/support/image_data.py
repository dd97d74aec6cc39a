"""Data modules of images."""

from __future__ import annotations

from typing import Any

from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.data import ImageDataModule


def image_data(*, batch_size: int = 4, seed: int = 0, augment: Any = None, **keys: Any) -> ImageDataModule:
    """The data module of these keys of `data`; it opens nothing yet."""
    keys = {"num_workers": 0} | keys
    return ImageDataModule(ImageDataKeys(**keys), batch_size=batch_size, seed=seed, augment=augment)
