"""The keys of `data` of tasks on text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from longseq.tasks.training.options import Length, Range, spell

Fraction = Annotated[float, Range(0, below=1)]

_PREPARED = ("python_sources", "files")
# The sources that read a key. All sources read the keys that are not here.
READ_BY: dict[str, tuple[str, ...]] = {
    "root": ("files", "tokens"),
    "weights": ("files", "tokens"),
    "tokenizer": _PREPARED,
    "separator": _PREPARED,
    "column": ("files",),
    "prompt_column": ("files",),
    "validation": ("standard_library", *_PREPARED),
    "test": ("standard_library", *_PREPARED),
    "cache": _PREPARED,
}


@dataclass(frozen=True, kw_only=True)
class TextDataKeys:
    """The keys of `data`, explained in `longseq.tasks.lm.data.LanguageModelData`."""

    name: str
    source: Literal["standard_library", "python_sources", "files", "tokens"]
    root: str | Annotated[list[str], Length(1)] | None = None
    weights: Annotated[list[Annotated[float, Range(above=0)]], Length(1)] | None = None
    check: bool = True
    tokenizer: str | None = None
    separator: str | None = None
    column: str | None = None
    prompt_column: str | None = None
    validation: Fraction | None = None
    test: Fraction | None = None
    cache: str | None = None
    window: Annotated[int, Range(2)]
    packing: Literal["concatenated", "documents", "streams"] = "concatenated"
    reset_state: bool = True
    eval_batch_size: Annotated[int | None, Range(1)] = None
    num_workers: Annotated[int, Range(0)] = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.root is None and self.source in ("tokens", "files"):
            what = "the folder that `longseq prepare` has written" if self.source == "tokens" else "the text"
            raise ValueError(f"data={self.name} reads a folder or a file: give data.root=PATH, {what}")
        unread = [name for name in READ_BY if getattr(self, name) is not None and self.source not in READ_BY[name]]
        if unread:
            raise ValueError(
                f"data.{unread[0]}={spell(getattr(self, unread[0]))} is not read by data.source={self.source}: "
                f"set data.{unread[0]}=null"
            )
        if self.validation is not None and self.test is not None and self.validation + self.test >= 1:
            raise ValueError(
                f"data.validation={self.validation} and data.test={self.test} leave nothing to train on: give less "
                "than 1"
            )
        roots = 1 if self.root is None or isinstance(self.root, str) else len(self.root)
        if self.weights is not None and len(self.weights) != roots:
            raise ValueError(
                f"data.weights has {len(self.weights)} entries, data.root {roots}: give one for each folder, or "
                "data.weights=null"
            )
        if self.packing == "streams" and roots > 1:
            raise ValueError("data.packing=streams reads one corpus: give one data.root, or another data.packing")
        if self.packing == "documents" and not self.reset_state:
            raise ValueError("data.packing=documents keeps documents apart: leave data.reset_state at true")
