"""A plug-in with classes that a configuration names: a model and a Dataset; dark or bright."""

import torch
from torch import nn
from torch.utils.data import Dataset


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
