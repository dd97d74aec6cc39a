"""Training, evaluation and prediction with PyTorch Lightning.

The modules of the tasks are Lightning's, for a program of one's own:

    keys = ImageDataKeys(name="digits", source="digits", img_size=8, in_chans=1)
    data = ImageDataModule(keys, batch_size=64)
    module = ImageClassifier(model, num_classes=10, training=Training(learning_rate=2e-3))
    Trainer(max_epochs=3).fit(module, datamodule=data)

The names below are also what a plug-in takes for a task of its own (see docs/pages/task.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longseq.tasks.config import Keys, TaskKeys, key
    from longseq.tasks.data.info import Info
    from longseq.tasks.data.module import SampleData
    from longseq.tasks.document.config import DocumentInfo
    from longseq.tasks.document.module import DocumentTask
    from longseq.tasks.image.config import ImageDataKeys
    from longseq.tasks.image.data import ImageDataModule
    from longseq.tasks.image.info import DataInfo
    from longseq.tasks.image.module import ImageClassifier
    from longseq.tasks.lm.data import LanguageModelData
    from longseq.tasks.lm.module import LanguageModelTask
    from longseq.tasks.probe.config import ProbeDataKeys
    from longseq.tasks.probe.data import ProbeDataModule
    from longseq.tasks.probe.module import ProbeTask
    from longseq.tasks.registry import Task
    from longseq.tasks.report import Report
    from longseq.tasks.text.tokenizer import TextInfo
    from longseq.tasks.training.metrics import MeanLoss, MeanScore
    from longseq.tasks.training.module import TrainedModule
    from longseq.tasks.training.recipe import Training
    from longseq.tasks.training.schedule import RunLength
    from longseq.tasks.training.token_model import TokenModel, build_token_model

__all__ = [
    "DataInfo",
    "DocumentInfo",
    "DocumentTask",
    "ImageClassifier",
    "ImageDataKeys",
    "ImageDataModule",
    "Info",
    "Keys",
    "LanguageModelData",
    "LanguageModelTask",
    "MeanLoss",
    "MeanScore",
    "ProbeDataKeys",
    "ProbeDataModule",
    "ProbeTask",
    "Report",
    "RunLength",
    "SampleData",
    "Task",
    "TaskKeys",
    "TextInfo",
    "TokenModel",
    "TrainedModule",
    "Training",
    "build_token_model",
    "key",
]

# Imported on first use: a module below this package must not wait for all tasks.
_MODULES = {
    "DataInfo": "image.info",
    "DocumentInfo": "document.config",
    "DocumentTask": "document.module",
    "ImageClassifier": "image.module",
    "ImageDataKeys": "image.config",
    "ImageDataModule": "image.data",
    "Info": "data.info",
    "Keys": "config",
    "LanguageModelData": "lm.data",
    "LanguageModelTask": "lm.module",
    "MeanLoss": "training.metrics",
    "MeanScore": "training.metrics",
    "ProbeDataKeys": "probe.config",
    "ProbeDataModule": "probe.data",
    "ProbeTask": "probe.module",
    "Report": "report",
    "RunLength": "training.schedule",
    "SampleData": "data.module",
    "Task": "registry",
    "TaskKeys": "config",
    "TextInfo": "text.tokenizer",
    "TokenModel": "training.token_model",
    "TrainedModule": "training.module",
    "Training": "training.recipe",
    "build_token_model": "training.token_model",
    "key": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
