"""The keys of commands: the common ones, and how a command reads its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from longseq.arguments import Inert
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.options import Required, read, spell

CHECKPOINT_NEEDED = Required("give checkpoint=FILE, such as outputs/image/RUN/checkpoints/best.ckpt")


@dataclass(frozen=True, kw_only=True)
class CommandKeys:
    """The keys that every command has; a command's own dataclass adds its keys."""

    plugins: list[str] = field(default_factory=list)


Keys = TypeVar("Keys", bound=CommandKeys)


def refuse_empty(keys: CommandKeys, *names: str) -> None:
    """Raise ValueError, in one line, for a path that is empty, as from a variable of a shell that is not set."""
    for name in names:
        if getattr(keys, name) == "":
            raise ValueError(f"{name}= is empty: give a path, or leave it out")


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


def refuse_inert(place: str, chosen: Mapping[str, Any], inert_with: Inert) -> None:
    """Raise ValueError, in one line, if a person gave an option that has no effect beside the others.

    A sweep may combine all values of several options.

    Args:
        place: the dotted key of the options `chosen`.
    """
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return
    for option, cases in inert_with.items():
        for case in cases:
            found = {other: chosen.get(other) for other in case}
            if all(_holds(found[other], values) for other, values in case.items()):
                beside = " with ".join(f"{place}.{other}={spell(value)}" for other, value in found.items())
                why = f"{beside} does not read it"
                refuse_given(lambda key, own=f"{place}.{option}": key == own, why)  # type: ignore[misc]


def _holds(found: Any, values: Collection[Any]) -> bool:
    """Whether a value, or each of a list's, is one of these."""
    return all(value in values for value in (found if isinstance(found, list) else [found]))


def compile_modes() -> list[str]:
    """The modes of `torch.compile`."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())
