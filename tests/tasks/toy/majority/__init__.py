"""A task from outside longseq: which of two tokens stands more often in a sequence?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import torch
from torch import nn
from torch.utils.data import Dataset

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import registry
from longseq.tasks.data.batch import Batch
from longseq.tasks.data.loader import BatchLoader, TrainingLoader
from longseq.tasks.data.module import TaskData
from longseq.tasks.data.place import find_place, follow
from longseq.tasks.data.sampler import EvaluationSampler, TrainingSampler
from longseq.tasks.report import Report
from longseq.tasks.training.keys import TaskKeys
from longseq.tasks.training.metrics import MeanLoss, MeanScore
from longseq.tasks.training.model import TaskModel, mixer_options
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.options import Range

STOP: int | None = None  # the update before which a training is interrupted


@dataclass(frozen=True, kw_only=True)
class MajorityKeys:
    name: str
    tokens: Annotated[int, Range(1)]
    samples: Annotated[int, Range(1)]


@dataclass(frozen=True)
class MajorityInfo:
    tokens: int
    sizes: dict[str, int]

    def to_dict(self):
        return asdict(self)

    def describe(self):
        return f"{self.tokens} bits a sequence"


class Sequences(Dataset):
    """Random bits; an item is the batch of some places."""

    def __init__(self, keys, seed):
        self.tokens = torch.randint(2, (keys.samples, keys.tokens), generator=torch.Generator().manual_seed(seed))

    def __getitem__(self, places):
        rows = self.tokens[[getattr(place, "position", place) for place in places]]
        return Batch(rows, (rows.float().mean(dim=1) > 0.5).long(), [])


class MajorityData(TaskData):
    def __init__(self, keys, *, batch_size, seed):
        super().__init__()
        self.keys, self.batch_size, self.eval_batch_size, self.seed = keys, batch_size, batch_size, seed
        self.options = {"num_workers": 0, "pin_memory": False, "report": lambda failures: None}

    @classmethod
    def from_config(cls, config, batch_size):
        return cls(MajorityKeys(**config["data"]), batch_size=batch_size, seed=config["seed"])

    @classmethod
    def read_info(cls, values):
        return MajorityInfo(**values)

    @property
    def info(self):
        return MajorityInfo(self.keys.tokens, dict.fromkeys(("train", "val", "test"), self.keys.samples))

    @property
    def batches_per_epoch(self):
        return len(self._sampler())

    def train_dataloader(self):
        return TrainingLoader(Sequences(self.keys, 0), self._sampler(), **self.options, **follow(self.trainer))

    def val_dataloader(self):
        return self._measured(seed=1)

    def test_dataloader(self):
        return self._measured(seed=2)

    def _sampler(self):
        return TrainingSampler(self.keys.samples, self.batch_size, seed=self.seed, **find_place(self.trainer)._asdict())

    def _measured(self, seed):
        place = find_place(self.trainer)
        sampler = EvaluationSampler(self.keys.samples, self.batch_size, rank=place.rank, world_size=place.world_size)
        return BatchLoader(Sequences(self.keys, seed), sampler, **self.options)


class MajorityModel(TaskModel):
    def build(self, config, info):
        torch.manual_seed(config["seed"])
        options = {key: config["model"][key] for key in ("d_model", "depth")}
        mixer = {"mixer": config["mixer"]["name"], "mixer_options": mixer_options(config)}
        return TokenBackbone(vocab_size=2, **options, **mixer)


class MajorityModule(TrainedModule):
    def __init__(self, backbone, training=None):
        super().__init__(backbone, training)
        self.val_metrics, self.test_metrics = (
            nn.ModuleDict({"loss": MeanLoss(), "accuracy": MeanScore()}) for _ in range(2)
        )

    @classmethod
    def from_config(cls, config, backbone, info, training):
        return cls(backbone, training)

    def forward(self, tokens):
        features, _ = self.backbone.forward_features(tokens, output_final_state=False)
        return self.backbone.forward_head(features[:, -1])

    def training_step(self, batch, batch_idx):
        self.seed_batch(batch_idx)
        if STOP is not None and self.global_step == STOP:
            raise InterruptedError
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self._measure(batch, self.val_metrics, "val")

    def test_step(self, batch, batch_idx):
        self._measure(batch, self.test_metrics, "test")

    def _measure(self, batch, metrics, stage):
        if len(batch[1]):
            scores = self(batch[0])
            metrics["loss"].update(nn.functional.cross_entropy(scores, batch[1]), weight=len(batch[1]))
            metrics["accuracy"].update((scores.argmax(dim=1) == batch[1]).float().mean(), weight=len(batch[1]))
        for name, metric in metrics.items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)


class MajorityReport(Report):
    headline = ("accuracy", "loss")

    def extras(self, module, info, split):
        return {"bits": info.tokens}


registry.register(
    "majority",
    registry.Task(TaskKeys(MajorityKeys), MajorityData, MajorityModel(), MajorityModule, MajorityReport()),
)
