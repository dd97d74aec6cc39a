"""Mixup, CutMix, label smoothing and class weights of a batch, a function of (seed, update, part of the batch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from timm.data import Mixup
from timm.data.mixup import mixup_target
from torch import Tensor

from longseq.tasks.data.sampler import derive_seed


class Mixed(NamedTuple):
    """Images `[B, C, H, W]`, their soft targets `[B, classes]`, and the weights of the losses.

    `weights` are `[B, 1]`, of images, or `[B, classes]`, of decisions about labels; None if all are 1.
    """

    images: Tensor
    targets: Tensor
    weights: Tensor | None


class BatchMixing:
    """Mixes image i with image B - 1 - i of the batch, and makes soft targets and the weights of their losses.

    With mixup = cutmix = 0, images are unchanged and targets are only smoothed. Zhang et al. 2018 (arXiv:1710.09412),
    Yun et al. 2019 (arXiv:1905.04899), in timm's implementation.

    `class_weights` multiply the loss of an image by the weight of its class; with `multi_label` the loss of each of an
    image's own labels by the weight of that label. A mixed image has the losses of both images, each with its own
    weight and the share of that image. Smoothing moves a part of the target to all classes evenly, or with
    `multi_label` each target towards 1/2; the weights remain those of the true classes.
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
        class_weights: Sequence[float] | None = None,
        multi_label: bool = False,
    ) -> None:
        self.num_classes, self.seed, self.label_smoothing = num_classes, seed, label_smoothing
        self.multi_label = multi_label
        self._class_weights = None if class_weights is None else torch.tensor(class_weights)
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

    def __call__(self, images: Tensor, targets: Tensor, *, update: int, part: int = 0) -> Mixed:
        """Mix in place: images [B, C, H, W] float, targets [B] int or with `multi_label` [B, classes] of 0 and 1.

        `update` and `part` are those of `TrainedModule.seed_batch`. ValueError for an odd B.
        """
        if self._mixup is not None and len(images) % 2:
            raise ValueError(f"Mixup and CutMix pair the images of a batch: batch size {len(images)} per device is odd")
        if self._class_weights is None and not self.multi_label:
            if self._mixup is None:
                return Mixed(images, mixup_target(targets, self.num_classes, smoothing=self.label_smoothing), None)
            return Mixed(*self._mix(self._mixup, images, targets, update, part), None)
        smooth, weights = self._smooth(targets), self._weigh(targets)
        if self._mixup is None:
            return Mixed(images, smooth, weights)
        shares = self._share(self._mixup, images, update, part)
        if weights is None:
            return Mixed(images, shares @ smooth, None)
        # A loss is linear in its target. So the weighted losses of both images are one loss of a weighted target.
        mixed = shares @ weights
        return Mixed(images, (shares @ (weights * smooth)) / mixed.clamp_min(torch.finfo(mixed.dtype).tiny), mixed)

    def weigh(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Probabilities `[B, classes]` that are given as targets, and the weights of their losses.

        An image has the losses of its classes, each with its weight and its probability, without smoothing. A row of
        one class has the loss of that class's number.
        """
        if self._class_weights is None:
            return targets, None
        self._class_weights = self._class_weights.to(targets.device)
        # As of a mixed image: a loss is linear in its target.
        weighted = targets * self._class_weights
        sums = weighted.sum(dim=1, keepdim=True)
        return weighted / sums.clamp_min(torch.finfo(sums.dtype).tiny), sums

    def _smooth(self, targets: Tensor) -> Tensor:
        if self.multi_label:
            return targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        return mixup_target(targets, self.num_classes, smoothing=self.label_smoothing)

    def _weigh(self, targets: Tensor) -> Tensor | None:
        """The weights of images, `[B, 1]`, or of the decisions about their labels, `[B, classes]`."""
        if self._class_weights is None:
            return None
        # the copy to a device is made once
        weights = self._class_weights = self._class_weights.to(targets.device)
        return torch.where(targets > 0, weights, 1.0) if self.multi_label else weights[targets].unsqueeze(1)

    def _share(self, mixup: Mixup, images: Tensor, update: int, part: int) -> Tensor:
        """Mix the images; returns the share `[B, B]` of image j in image i.

        timm mixes the targets as it mixes the images. So targets that are the images' own numbers become the shares.
        """
        numbered = torch.arange(len(images), device=images.device)
        own = mixup.num_classes, mixup.label_smoothing
        mixup.num_classes, mixup.label_smoothing = len(images), 0.0
        try:
            return self._mix(mixup, images, numbered, update, part)[1]
        finally:
            mixup.num_classes, mixup.label_smoothing = own

    def _mix(self, mixup: Mixup, images: Tensor, targets: Tensor, update: int, part: int) -> tuple[Tensor, Tensor]:
        # timm draws from numpy's global generator
        state = np.random.get_state()  # noqa: NPY002
        np.random.seed(derive_seed(self.seed, update, part) % 2**32)  # noqa: NPY002
        try:
            return mixup(images, targets)
        finally:
            np.random.set_state(state)  # noqa: NPY002
