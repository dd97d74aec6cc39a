"""The configuration keys of language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from longseq.tasks.config import Count, Keys, Positive, TaskKeys, key
from longseq.tasks.training.configuration import TokenModelKeys

Part = Annotated[float, Field(ge=0, le=1)]

_ROOTS, _PREPARED = ("root", "weights"), ("validation", "test", "cache")
# The keys that not all sources read, by source.
READS = {
    "standard_library": _PREPARED,
    "tokens": _ROOTS,
    "files": (*_ROOTS, *_PREPARED, "tokenizer", "separator", "column", "prompt_column"),
}


class TextDataKeys(Keys):
    """The keys of `data`."""

    name: str = key(..., "the name in tables")
    source: Literal["standard_library", "files", "tokens"] = key(..., "the kind of text")
    root: str | Annotated[list[str], Field(min_length=1)] | None = key(
        None, "a file, a folder, or a list, mixed by weights"
    )
    weights: Annotated[list[Positive], Field(min_length=1)] | None = key(None, "the share of each root")
    check: bool = key(True, "compare the checksums of prepared tokens")
    tokenizer: str | None = key(None, "bytes, a tokenizer.json or its folder, train:16384; null: init's, else bytes")
    separator: str | None = key(None, "the token between documents")
    column: str | None = key(None, "the column of the text, in jsonl, tables and saved sets")
    prompt_column: str | None = key(None, "the column of the prompts, which are read and not trained on")
    validation: Part | None = key(None, "the share of the text that validates")
    test: Part | None = key(None, "the share of the text that tests; 1: all of it, to evaluate")
    cache: str | None = key(None, "the folder of prepared text; null: longseq/text in XDG_CACHE_HOME")
    window: int = key(..., "the tokens of a window", ge=2)
    packing: Literal["concatenated", "documents", "streams"] = key("concatenated", "how windows are filled")
    reset_state: bool = key(True, "reset the state where a document begins")
    eval_batch_size: Count | None = key(None, "windows at a time; null: the training batch of one device")
    num_workers: int = key(0, "processes that read windows", ge=0)
    pin_memory: bool = key(False, "copy batches to a GPU from pinned memory")

    @model_validator(mode="after")
    def _agree(self) -> TextDataKeys:
        if self.root is None and self.source in ("tokens", "files"):
            raise ValueError(f"data={self.name} reads a folder or a file: give data.root=PATH")
        for name in READS["files"]:
            if getattr(self, name) is not None and name not in READS[self.source]:
                raise ValueError(f"{name} is not read by source={self.source}: set data.{name}=null")
        if (self.validation or 0) + (self.test or 0) > 1:
            raise ValueError("validation and test are more than the text")
        roots = len(self.root) if isinstance(self.root, list) else 1
        if self.weights is not None and len(self.weights) != roots:
            raise ValueError(f"weights has {len(self.weights)} entries, root {roots}: give one for each folder")
        if self.packing == "streams" and roots > 1:
            raise ValueError("packing=streams reads one corpus: give one root, or another packing")
        if self.packing == "documents" and not self.reset_state:
            raise ValueError("packing=documents keeps documents apart: leave reset_state at true")
        return self


class LossKeys(Keys):
    """The keys of `recipe.loss`."""

    z_loss: Annotated[float, Field(ge=0)] = key(0.0, "the weight of the penalty on the normalizers, 1e-4 in PaLM")


class CausalModelKeys(TokenModelKeys):
    """The keys of `model`. In another direction a model would see the tokens that it predicts."""

    direction: Literal["forward"] | None = key(None, "forward")


@dataclass(frozen=True)
class LanguageModelKeys(TaskKeys):
    """The keys of language models."""

    data: type[Keys] = TextDataKeys
    model: type[Keys] = CausalModelKeys
    loss: type[Keys] | None = LossKeys
