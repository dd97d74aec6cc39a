"""The activations that map the score of a query with each slot to the weight of the slot."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "identity": lambda x: x,
    "silu": functional.silu,
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x).square(),
}
