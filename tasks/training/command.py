"""The keys of commands: the common ones, and how a command reads its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hydra.core.hydra_config import HydraConfig
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


def command_words() -> list[str] | None:
    """The overrides of the command that runs; None without one."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None


def refuse_given(is_unread: Callable[[str], bool], why: str) -> None:
    """Raise ValueError, in one line, if a person gave a key that has no effect in this command.

    `is_unread` gets a dotted key, or the name of a group; `why` says why it has no effect.
    """
    for word in command_words() or []:
        key = word.lstrip("+~").partition("=")[0]
        if is_unread(key):
            raise ValueError(f"{word.lstrip('+')} has no effect: {why}; leave it out")


def compile_modes() -> list[str]:
    """The modes of `torch.compile`."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())
