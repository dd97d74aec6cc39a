"""Image files for `longseq predict`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from longseq.tasks.commands import Predict
from longseq.tasks.data.loader import share_memory
from longseq.tasks.data.module import NO_DETAILS, TOP_K, Inputs, Prediction, Unreadable, decided_details, predictions_of
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.datasets import EvaluationBatches
from longseq.tasks.image.decoding import is_image
from longseq.tasks.image.files import FileSource
from longseq.tasks.image.sources import Split
from longseq.tasks.image.transforms import evaluation_transform, normalize
from longseq.tasks.text.sources import files_below

_log = logging.getLogger(__name__)


class ImageFiles(Inputs):
    """The image files below a folder, or one file, in the order of their paths, transformed for a model.

    A prediction has the five most probable classes, or all labels if the info has `multi_label`. Hidden files and files
    without an image ending are left out. ValueError if there are no images.
    """

    def __init__(self, path: str, info: DataInfo, keys: Predict | None = None) -> None:
        root = Path(path)
        self.paths = [str(root)] if root.is_file() else sorted(filter(is_image, files_below(root)))
        if not self.paths:
            raise ValueError(f"input={path} holds no images")
        split = Split.whole(FileSource([], np.zeros(len(self.paths), np.int64), self.paths))
        self.info, self.batches = info, EvaluationBatches(split, evaluation_transform(info), info)
        self.details = decided_details(info)

    def predict(self, model: nn.Module, keys: Predict) -> Iterator[Prediction | Unreadable]:
        info, device = self.info, next(model.parameters()).device
        count = keys.top_k or (len(info.class_names) if info.multi_label else TOP_K)
        places = BatchSampler(range(len(self.paths)), keys.batch_size, drop_last=False)
        loader = DataLoader(self.batches, None, sampler=places, num_workers=keys.num_workers, collate_fn=share_memory)
        for batch, (images, _, failures) in zip(places, loader, strict=True):
            failed = {one.path for one in failures}
            read = [self.paths[place] for place in batch if self.paths[place] not in failed]
            if read:
                logits = model(normalize(images.to(device), info))
                yield from predictions_of(((path, NO_DETAILS) for path in read), logits, info, count)
            for one in failures:
                _log.warning("skipped unreadable image %s (%s)", one.path, one.reason)
                yield Unreadable(one.path, f"unreadable: {one.reason}")
