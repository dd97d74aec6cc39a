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

_INSTALL = "tokenizer files need the library tokenizers: pip install tokenizers"


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
    left out. `special_names` are the names of its special tokens, which are ordinary text where a text holds them.
    ValueError if the text is not a tokenizer, if it has no such token, or if the library is not installed.
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
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise ValueError(_INSTALL) from error
        try:
            self._tokenizer = Library.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{name} is no tokenizer file of the library tokenizers: {error}") from error
        self._text = text
        if getattr(self._tokenizer.model, "dropout", None):  # of a checkpoint from before it was left out
            self._tokenizer.model.dropout = None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_names = sorted(token.content for token in added if token.special)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            raise ValueError(f"{name} has an empty vocabulary")
        found = _find_separator(self._tokenizer, separator)
        if found is None:
            wanted = repr(separator) if separator else f"end-of-text token ({', '.join(SEPARATORS)})"
            raise ValueError(
                f"{name} has no {wanted}: give separator=TOKEN (in a training data.separator=TOKEN), a token of its "
                "vocabulary that no text has"
            )
        self.separator_name, self.separator = found
        begins = _find_separator(self._tokenizer, start) if start else found
        if begins is None:
            raise ValueError(f"{name} has no {start!r}, with which its texts begin")
        self.start_name, self.start = begins
        self.bare_prompts = bare_prompts

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        for text in texts:
            text.encode()  # the library replaces lone surrogates or fails, depending on the normaliser
        # `encode_special_tokens` makes the tokenizer treat the separator's name in a text as ordinary text.
        self._tokenizer.encode_special_tokens = True
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself, as for an unknown word without a token for it
            raise ValueError(f"the tokenizer cannot encode a text: {error}") from error
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

    A folder's tokenizer_config.json names the separator where `separator` does not. FileNotFoundError or ValueError, in
    one line, where there is none.
    """
    if choice == "bytes":
        refuse_separator(choice, separator)
        return ByteTokenizer()
    path = _find_file(choice, "tokenizer")
    return tokenizer_from_dict(tokenizer_files.read_tokenizer(path, separator), str(path))


def require_tokenizer(choice: str | None) -> None:
    """Raise ValueError, in one line, if the file of `data.tokenizer` is not there; it is not read."""
    if choice is not None and choice != "bytes" and trained_size(choice) is None:
        _find_file(choice, "data.tokenizer")


def _find_file(choice: str, key: str) -> Path:
    path = Path(choice)
    if path.is_dir():
        path = path / tokenizer_files.TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(f"{key}={choice} holds no tokenizer.json")
    if not path.is_file():
        raise ValueError(f"{key}={choice} is no file: give bytes, train:SIZE, or a tokenizer.json")
    return path


def tokenizer_from_dict(values: Mapping[str, Any], name: str = "the tokenizer") -> Tokenizer:
    """The inverse of `Tokenizer.to_dict`; `name` is that of the tokenizer in messages."""
    if values["kind"] == "bytes":
        return ByteTokenizer()
    if values["kind"] == "file":
        bare = bool(values.get("bare_prompts"))
        return FileTokenizer(values["json"], values["separator"], name, values.get("start"), bare_prompts=bare)
    raise ValueError(f"tokenizers of the kind {values['kind']!r} are unknown: this file is of a later version")


def trained_size(choice: str) -> int | None:
    """The size in `train:SIZE`; None for another choice. Raises ValueError for a size that is not a number."""
    if not choice.startswith("train:"):
        return None
    size = choice.removeprefix("train:")
    if not size.isdecimal():
        raise ValueError(f"tokenizer={choice}: give train:SIZE, such as train:16384")
    return int(size)


def refuse_separator(choice: str, separator: str | None) -> None:
    """Raise ValueError if a separator is named for a tokenizer whose separator is fixed."""
    if separator is not None:
        raise ValueError(
            f"separator={separator}: the tokens of tokenizer={choice} have a separator of their own; leave it out, or "
            "give a tokenizer.json"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Byte-pair encoding of bytes, as in GPT-2, trained on texts; its separator is <|endoftext|>.

    ValueError for a vocabulary that cannot hold all bytes and the separator.
    """
    if vocab_size < 257:
        raise ValueError(
            f"tokenizer=train:{vocab_size}: a vocabulary needs the 256 bytes and the separator, 257 tokens"
        )
    try:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(_INSTALL) from error
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


def _find_separator(tokenizer: Any, wanted: str | None) -> tuple[str, int] | None:
    for name in (wanted,) if wanted else SEPARATORS:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return name, number
    return None
