"""Two layers that read the same tokens in one pass, one forward and one backward: their rows and their parameters.

Rows of a pair are `[2 B, ...]`: the first half is read forward, the second backward. Parameters are `[2, ...]`.
"""

from typing import TypeVar

import torch
from torch import Tensor

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def repeat_rows(x: MaybeTensor) -> MaybeTensor:
    """Repeat `x [B, ...]` along the batch: `[2 B, ...]`. None gives None."""
    return x if x is None else torch.cat((x, x))


def stack_pair(forward: MaybeTensor, backward: MaybeTensor) -> MaybeTensor:
    """Stack a parameter of the layers that read forward and backward: `[2, ...]`. None gives None."""
    return forward if forward is None or backward is None else torch.stack((forward, backward))
