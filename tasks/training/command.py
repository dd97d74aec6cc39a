"""The keys of commands: the common ones, and how a command reads its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from omegaconf import DictConfig

from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.options import Required, read

CHECKPOINT_NEEDED = Required("give checkpoint=FILE, such as outputs/image/RUN/checkpoints/best.ckpt")


@dataclass(frozen=True, kw_only=True)
class CommandKeys:
    """The keys that every command has; a command's own dataclass adds its keys."""

    plugins: list[str] = field(default_factory=list)


Keys = TypeVar("Keys", bound=CommandKeys)


def read_command(keys: type[Keys], cfg: DictConfig) -> Keys:
    """The keys of a command, from its YAML file and the command line. ValueError, in one line, for a mistake."""
    return read(keys, resolve(cfg))


def compile_modes() -> list[str]:
    """The modes of `torch.compile`."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())
