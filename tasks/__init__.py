"""Training, evaluation and prediction with PyTorch Lightning.

The modules of the tasks are Lightning's, for a program of one's own:

    keys = ImageDataKeys(name="digits", source="digits", img_size=8, in_chans=1)
    data = ImageDataModule(keys, batch_size=64)
    module = ImageClassifier(model, num_classes=10, training=Training(learning_rate=2e-3))
    Trainer(max_epochs=3).fit(module, datamodule=data)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longseq.tasks.image.config import ImageDataKeys
    from longseq.tasks.image.data import ImageDataModule
    from longseq.tasks.image.module import ImageClassifier
    from longseq.tasks.lm.data import LanguageModelData
    from longseq.tasks.lm.module import LanguageModelTask
    from longseq.tasks.probe.config import ProbeDataKeys
    from longseq.tasks.probe.data import ProbeDataModule
    from longseq.tasks.probe.module import ProbeTask
    from longseq.tasks.training.length import RunLength
    from longseq.tasks.training.module import TrainedModule
    from longseq.tasks.training.recipe import Training

__all__ = [
    "ImageClassifier",
    "ImageDataKeys",
    "ImageDataModule",
    "LanguageModelData",
    "LanguageModelTask",
    "ProbeDataKeys",
    "ProbeDataModule",
    "ProbeTask",
    "RunLength",
    "TrainedModule",
    "Training",
]

# Imported on first use: a module below this package must not wait for all tasks.
_MODULES = {
    "ImageClassifier": "image.module",
    "ImageDataKeys": "image.config",
    "ImageDataModule": "image.data",
    "LanguageModelData": "lm.data",
    "LanguageModelTask": "lm.module",
    "ProbeDataKeys": "probe.config",
    "ProbeDataModule": "probe.data",
    "ProbeTask": "probe.module",
    "RunLength": "training.length",
    "TrainedModule": "training.module",
    "Training": "training.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
