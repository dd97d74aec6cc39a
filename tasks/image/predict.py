"""Image files for `longseq predict`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from longseq.tasks.commands import Predict
from longseq.tasks.data.loader import UNREADABLE, share_memory
from longseq.tasks.data.module import NO_DETAILS, TOP_K, Inputs, Prediction, Unreadable, decided_details, predictions_of
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.datasets import stack_images
from longseq.tasks.image.decoding import decode, first_line
from longseq.tasks.image.files import find_images
from longseq.tasks.image.transforms import evaluation_transform, normalize

_log = logging.getLogger(__name__)


class ImageFiles(Inputs, Dataset[Any]):
    """The image files below a folder, or one file, in the order of their paths, transformed for a model.

    A prediction has the five most probable classes, or all labels if the info has `multi_label`. Items are (uint8
    [C, H, W], path), or `Unreadable` with the reason, which is logged. Hidden files and files without an image ending
    are left out. ValueError if there are no images.
    """

    def __init__(self, path: str, info: DataInfo) -> None:
        root = Path(path)
        self.paths = [str(root)] if root.is_file() else sorted(find_images(str(root)))
        if not self.paths:
            raise ValueError(f"input={path} holds no images")
        self.info = info
        self.transform = evaluation_transform(info)
        self.details = decided_details(info)

    @classmethod
    def open(cls, path: str, info: DataInfo, keys: Predict) -> ImageFiles:
        return cls(path, info)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str] | Unreadable:
        path = self.paths[index]
        try:
            return self.transform(decode(path)), path
        except UNREADABLE as error:
            _log.warning("skipped unreadable image %s (%s)", path, first_line(error))
            return Unreadable(path, f"unreadable: {first_line(error)}")

    def collate(self, items: list[tuple[Tensor, str] | Unreadable]) -> tuple[Tensor, list[str], list[Unreadable]]:
        """Images uint8 [B, C, H, W], their paths, and the images that cannot be read."""
        read = [item for item in items if not isinstance(item, Unreadable)]
        images = stack_images([image for image, _ in read], self.info)
        failed = [item for item in items if isinstance(item, Unreadable)]
        return share_memory((images, [path for _, path in read], failed))

    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        info, device = self.info, next(model.parameters()).device
        count = keys.top_k or (len(info.class_names) if info.multi_label else TOP_K)
        loader = DataLoader(self, keys.batch_size, num_workers=keys.num_workers, collate_fn=self.collate)
        for batch, paths, failed in loader:
            if paths:
                logits = model(normalize(batch.to(device), info))
                yield from predictions_of(((path, NO_DETAILS) for path in paths), logits, info, count)
            yield from failed
