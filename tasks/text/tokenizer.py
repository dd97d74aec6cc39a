"""Tokenizers: bytes, which need no other library, and the tokenizer files of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longseq import tokenizer_files
from longseq.tokenizer_files import SEPARATORS

Tokens = npt.NDArray[np.integer[Any]]


class Tokenizer(ABC):
    """Maps text to numbers below `vocab_size` and back.

    `separator` is the token that begins and ends each document. No text maps to it. `start` is the token in front of a
    text that a model continues: the separator, or what a model of another library was trained with. With
    `bare_prompts` it stands in front of whole documents and of an empty text alone.
    """

    vocab_size: int
    separator: int
    start: int
    bare_prompts: bool = False

    @abstractmethod
    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without the separator. ValueError for text that is no Unicode (a lone surrogate)."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; separators are left out, bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain containers from which `tokenizer_from_dict` makes the tokenizer again."""

    @abstractmethod
    def describe(self) -> str:
        """The tokenizer in a few words."""

    def encode(self, text: str) -> Tokens:
        """The tokens of one text."""
        return self.encode_all([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens that a model reads before it continues a text: at least one."""
        tokens = self.encode(text).tolist()
        return tokens if self.bare_prompts and tokens else [self.start, *tokens]


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and the separator, 256."""

    vocab_size = 257
    separator = start = 256

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        # A lone surrogate raises UnicodeEncodeError, which is a ValueError.
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < self.separator).decode(errors="replace")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def describe(self) -> str:
        return "bytes"


class FileTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`, from the JSON text of its file.

    `separator` is the name of a token; by default the end-of-text token of well-known vocabularies. `start` is the name
    of the token in front of a text, by default the separator. Tokens that a tokenizer adds around a text by itself are
    left out; names of special tokens in a text are ordinary text. ValueError if the tokenizer has no such token.
    """

    def __init__(
        self,
        text: str,
        separator: str | None = None,
        name: str = "the tokenizer",
        start: str | None = None,
        *,
        bare_prompts: bool = False,
    ) -> None:
        from tokenizers import Tokenizer as Library

        self._tokenizer, self._text = Library.from_str(text), text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.separator_name, self.separator = self._find_token([separator] if separator else SEPARATORS, name)
        self.start_name, self.start = self._find_token([start or self.separator_name], name)
        self.bare_prompts = bare_prompts

    def _find_token(self, names: Sequence[str], tokenizer: str) -> tuple[str, int]:
        """The first of `names` that the tokenizer has, and its number."""
        for name in names:
            number = self._tokenizer.token_to_id(name)
            if number is not None:
                return name, number
        raise ValueError(f"{tokenizer} has none of the tokens {', '.join(names)}: name its separator")

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        # `encode_special_tokens` makes the tokenizer treat the separator's name in a text as ordinary text.
        self._tokenizer.encode_special_tokens = True
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([t for t in tokens if t != self.separator], skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {} if self.start == self.separator else {"start": self.start_name}
        own |= {"bare_prompts": True} if self.bare_prompts else {}
        return {"kind": "file", "separator": self.separator_name, "json": self._text, **own}

    def describe(self) -> str:
        return f"{json.loads(self._text)['model'].get('type') or 'tokenizer'} of {self.vocab_size} tokens"


def read_tokenizer(choice: str, separator: str | None = None) -> Tokenizer:
    """`bytes`, or the tokenizer of a file tokenizer.json, or of a folder that holds one, such as a saved model's.

    A folder's tokenizer_config.json names the separator where `separator` does not.
    """
    if choice == "bytes":
        return ByteTokenizer()
    path = Path(choice)
    if path.is_dir():
        path = path / tokenizer_files.TOKENIZER_FILE
    return tokenizer_from_dict(tokenizer_files.read_tokenizer(path, separator), str(path))


def tokenizer_from_dict(values: Mapping[str, Any], name: str = "the tokenizer") -> Tokenizer:
    """The inverse of `Tokenizer.to_dict`; `name` is that of the tokenizer in messages."""
    if values["kind"] == "bytes":
        return ByteTokenizer()
    bare = bool(values.get("bare_prompts"))
    return FileTokenizer(values["json"], values["separator"], name, values.get("start"), bare_prompts=bare)


def trained_size(choice: str) -> int | None:
    """The size in `train:SIZE`; None for another choice."""
    return int(choice.removeprefix("train:")) if choice.startswith("train:") else None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Byte-pair encoding of bytes, as in GPT-2, trained on texts; its separator is <|endoftext|>.

    A vocabulary has at least the 256 bytes and the separator.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer=trainer)
    return FileTokenizer(tokenizer.to_str())


def _pieces(texts: Iterable[str], size: int = 1 << 16) -> Iterator[str]:
    """Texts cut into pieces, which bounds the memory of the trainer."""
    for text in texts:
        for start in range(0, len(text), size):
            yield text[start : start + size]
