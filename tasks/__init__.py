"""Training, evaluation and prediction with PyTorch Lightning.

The tasks' Lightning modules also work in a program of your own:

    keys = ImageDataKeys(name="digits", source="digits", img_size=8, in_chans=1)
    data = ImageDataModule(keys, batch_size=64)
    module = ImageClassifier(model, num_classes=10, training=Training(learning_rate=2e-3))
    Trainer(max_epochs=3).fit(module, datamodule=data)

Plug-ins build tasks of their own from the names below (see docs/pages/task.md).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longseq.tasks.config import Keys as Keys
    from longseq.tasks.config import TaskKeys as TaskKeys
    from longseq.tasks.config import key as key
    from longseq.tasks.data.info import Info as Info
    from longseq.tasks.data.module import SampleData as SampleData
    from longseq.tasks.document.config import DocumentInfo as DocumentInfo
    from longseq.tasks.document.module import DocumentTask as DocumentTask
    from longseq.tasks.image.config import DataInfo as DataInfo
    from longseq.tasks.image.config import ImageDataKeys as ImageDataKeys
    from longseq.tasks.image.data import ImageDataModule as ImageDataModule
    from longseq.tasks.image.module import ImageClassifier as ImageClassifier
    from longseq.tasks.lm.data import LanguageModelData as LanguageModelData
    from longseq.tasks.lm.module import LanguageModelTask as LanguageModelTask
    from longseq.tasks.probe.config import ProbeDataKeys as ProbeDataKeys
    from longseq.tasks.probe.data import ProbeDataModule as ProbeDataModule
    from longseq.tasks.probe.module import ProbeTask as ProbeTask
    from longseq.tasks.registry import Task as Task
    from longseq.tasks.report import Report as Report
    from longseq.tasks.text.tokenizer import TextInfo as TextInfo
    from longseq.tasks.training.metrics import MeanLoss as MeanLoss
    from longseq.tasks.training.metrics import MeanScore as MeanScore
    from longseq.tasks.training.module import TrainedModule as TrainedModule
    from longseq.tasks.training.recipe import Training as Training
    from longseq.tasks.training.schedule import RunLength as RunLength
    from longseq.tasks.training.token_model import TokenModel as TokenModel
    from longseq.tasks.training.token_model import build_token_model as build_token_model

# The public names of each module. They are imported on first use: a module of one task need not wait for the others.
_NAMES = {
    "config": ("Keys", "TaskKeys", "key"),
    "data.info": ("Info",),
    "data.module": ("SampleData",),
    "document.config": ("DocumentInfo",),
    "document.module": ("DocumentTask",),
    "image.config": ("DataInfo", "ImageDataKeys"),
    "image.data": ("ImageDataModule",),
    "image.module": ("ImageClassifier",),
    "lm.data": ("LanguageModelData",),
    "lm.module": ("LanguageModelTask",),
    "probe.config": ("ProbeDataKeys",),
    "probe.data": ("ProbeDataModule",),
    "probe.module": ("ProbeTask",),
    "registry": ("Task",),
    "report": ("Report",),
    "text.tokenizer": ("TextInfo",),
    "training.schedule": ("RunLength",),
    "training.metrics": ("MeanLoss", "MeanScore"),
    "training.module": ("TrainedModule",),
    "training.recipe": ("Training",),
    "training.token_model": ("TokenModel", "build_token_model"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
