"""The properties of a text that a model, its checkpoints and generation need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longseq.tasks.data.info import Info
from longseq.tasks.text.tokenizer import Tokenizer, tokenizer_from_dict


@dataclass(frozen=True)
class TextInfo(Info):
    """The vocabulary of a text and the windows in which a model reads it.

    `vocab_size` is the number of tokens; `separator` the one that begins and ends each document; `window` the length of
    training windows in tokens; `tokenizer` what `Tokenizer.to_dict` returns; `sizes` counts the windows of each split;
    `text_bytes` the bytes that the targets of val and test stand for; `gzip_bits_per_byte` is what gzip -9 needs for
    the documents of test, each by itself, None where the text is not at hand (tokens that were prepared before).
    """

    vocab_size: int
    separator: int
    window: int
    tokenizer: dict[str, Any]
    text_bytes: dict[str, int] = field(default_factory=dict)
    gzip_bits_per_byte: float | None = None

    _changed = "another text"  # a few other words may leave as many windows
    _meaning = ("tokenizer", "separator")

    def make_tokenizer(self) -> Tokenizer:
        """ValueError where its library is not installed."""
        return tokenizer_from_dict(self.tokenizer)

    def describe(self) -> str:
        """The text in a few words."""
        return f"{self.vocab_size} tokens, windows of {self.window}"
