"""Mixup, CutMix and label smoothing of a batch, as a function of (seed, update, part of the effective batch)."""

from __future__ import annotations

import numpy as np
from timm.data import Mixup
from timm.data.mixup import mixup_target
from torch import Tensor

from longseq.tasks.data.seeds import derive_seed


class BatchMixing:
    """Mixes image i with image B - 1 - i of the batch, and makes soft targets.

    With mixup = cutmix = 0, images are unchanged and targets are only smoothed. Zhang et al. 2018 (arXiv:1710.09412),
    Yun et al. 2019 (arXiv:1905.04899), in timm's implementation.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        seed: int,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
    ) -> None:
        if mode not in ("batch", "pair", "elem"):
            raise ValueError(f"augment.mixing.mode={mode!r} is unknown: choose batch, pair or elem")
        self.num_classes, self.seed, self.label_smoothing = num_classes, seed, label_smoothing
        self._mixup = None
        if prob > 0 and (mixup > 0 or cutmix > 0):
            self._mixup = Mixup(
                mixup_alpha=mixup,
                cutmix_alpha=cutmix,
                prob=prob,
                switch_prob=switch_prob,
                mode=mode,
                label_smoothing=label_smoothing,
                num_classes=num_classes,
            )

    def __call__(self, images: Tensor, targets: Tensor, *, update: int, part: int = 0) -> tuple[Tensor, Tensor]:
        """Mix in place: images [B, C, H, W] float, targets [B] int -> images, soft targets [B, num_classes].

        `update` and `part` are those of `TrainedModule.seed_batch`. ValueError for an odd B.
        """
        if self._mixup is None:
            return images, mixup_target(targets, self.num_classes, smoothing=self.label_smoothing)
        if len(images) % 2:
            raise ValueError(f"Mixup and CutMix pair the images of a batch: batch size {len(images)} per device is odd")
        # timm draws from numpy's global generator
        state = np.random.get_state()  # noqa: NPY002
        np.random.seed(derive_seed(self.seed, update, part) % 2**32)  # noqa: NPY002
        try:
            return self._mixup(images, targets)
        finally:
            np.random.set_state(state)  # noqa: NPY002
