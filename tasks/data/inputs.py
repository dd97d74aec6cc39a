"""The input files of `longseq predict`."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

_NAMED = 5


class PassedOver(NamedTuple):
    """A file that was not read (or a hidden folder, with a slash at its end), and the reason."""

    path: str
    reason: str


class InputFiles(Dataset[Any]):
    """The files below a path that a model classifies, built from the path and the info of the model's data.

    `passed_over` lists the files there that are not inputs of the task. ValueError if there are no inputs.
    """

    passed_over: list[PassedOver]

    @abstractmethod
    def __init__(self, path: str, info: Any) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def collate(self, items: list[Any]) -> tuple[Tensor, list[str], list[str]]:
        """A batch `[B, ...]` of items, the paths of its B inputs, and the paths of those that cannot be read."""

    def prepare(self, batch: Tensor) -> Tensor:
        """The model's input for a batch, on the device of the batch."""
        return batch


def describe_passed_over(passed_over: Sequence[PassedOver], root: str) -> str:
    """Describe in one line how many files were passed over, of which kinds, and the first ones."""
    kinds = Counter(reason for _, reason in passed_over)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_NAMED))
    rest = sum(count for _, count in kinds.most_common()[_NAMED:])
    names = [os.path.relpath(path, root) + "/" * path.endswith("/") for path, _ in passed_over[:_NAMED]]
    more = ", ..." if len(passed_over) > _NAMED else ""
    return f"{counts}{f', {rest} others' if rest else ''}: {', '.join(names)}{more}"
