"""A plug-in with classes that a configuration names: a model, a Dataset and a LightningDataModule; dark or bright."""

import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Net(nn.Module):
    """Channels, averaged over the image, and a head."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.channels, self.head = nn.Conv2d(3, width, 3), nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.channels(images).relu().mean(dim=(2, 3)))


class Squares(Dataset):
    """Images of noise, dark and bright in turn.

    The label of the sample `wrong` is 7. The `targets` of all samples are `told` where that is given.
    """

    classes = ("dark", "bright")

    def __init__(self, samples: int, first: int = 0, wrong: int = -1, told: int = -1) -> None:
        self.samples, self.first, self.wrong = samples, first, wrong
        if told >= 0:
            self.targets = [told] * samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        draw = torch.Generator().manual_seed(self.first + index)
        label = index % 2
        pixels = torch.randint(128 * label, 128 * (label + 1), (3, 8, 8), generator=draw, dtype=torch.uint8)
        return pixels, 7 if index == self.wrong else label


class Batches(LightningDataModule):
    """Finished batches; its state is the number of its training loaders. A file `stop` ends the run that finds it."""

    num_classes = 2

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size, self.loaders, self.stages = batch_size, 0, []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)
        squares = Squares(32)
        images = torch.stack([squares[place][0] for place in range(32)])
        self.rows = TensorDataset(images / 127.5 - 1, torch.arange(32) % 2)

    def on_before_batch_transfer(self, batch, dataloader_idx: int):
        if self.trainer.global_step == 5 and (mark := Path("stop")).exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    def train_dataloader(self) -> DataLoader:
        self.loaders += 1
        return DataLoader(self.rows, self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, 16)

    def state_dict(self):
        return {"loaders": self.loaders, "stages": self.stages}

    def load_state_dict(self, state) -> None:
        self.loaders += state["loaders"]
