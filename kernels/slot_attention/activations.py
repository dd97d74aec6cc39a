"""What turns the match of a query with each slot into the weight with which the slot is read."""

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
