"""Tokenizers: bytes, and the tokenizer files of Hugging Face's `tokenizers`; text from tokens as they come."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longseq import tokenizer_files
from longseq.tasks.data.info import Info
from longseq.tokenizer_files import SEPARATORS, TOKENIZER_FILE

Tokens = npt.NDArray[np.integer[Any]]

_CONTEXT = 32  # tokens of the text before that are decoded with the first new ones
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(ABC):
    """Maps text to numbers below `vocab_size` and back; made of a dictionary of `longseq.tokenizer_files`.

    `separator` is the token that begins and ends each document. No text maps to it. `start` is the token in front of a
    text that a model continues: the separator, or the token that a model of another library was trained with. With
    `bare_prompts` only whole documents and an empty text begin with it. `ends` are the tokens that end a text that a
    model writes: the separator, and others that the model lists.
    """

    vocab_size: int
    separator: int
    start: int

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self.bare_prompts = bool(values.get("bare_prompts"))
        self.ends: tuple[int, ...] = (self.separator, *values.get("ends", ()))

    @abstractmethod
    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without the separator. ValueError for text with a lone surrogate."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens. Separators are left out; bytes that are not UTF-8 become U+FFFD."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers from which `tokenizer_from_dict` makes the tokenizer again."""
        return dict(self._values)

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

    def __init__(self, values: Mapping[str, Any] = tokenizer_files.BYTES) -> None:
        super().__init__(values)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < self.separator).decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`; special tokens are neither added nor read from a text.

    ValueError if the tokenizer does not have the separator or the start.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer as Library

        self._tokenizer = Library.from_str(values["json"])
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.separator = self._number(values["separator"])
        self.start = self._number(values.get("start") or values["separator"])
        super().__init__(values)

    def _number(self, name: str | None) -> int:
        number = None if name is None else self._tokenizer.token_to_id(name)
        if number is None:
            raise ValueError(f"the tokenizer has no token {name}: give the separator, one of its tokens")
        return number

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        self._tokenizer.encode_special_tokens = True  # reads their names as ordinary text
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([t for t in tokens if t != self.separator], skip_special_tokens=False)


def read_tokenizer(choice: str, separator: str | None = None) -> Tokenizer:
    """`bytes`, or the tokenizer of a file tokenizer.json, or of a folder with one, such as a saved model's.

    By default the separator is the one that the folder's tokenizer_config.json names.
    """
    if choice == "bytes":
        return ByteTokenizer()
    path = Path(choice)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    return tokenizer_from_dict(tokenizer_files.read_tokenizer(path, separator))


def tokenizer_from_dict(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a dictionary as in `longseq.tokenizer_files`."""
    return ByteTokenizer(values) if values["kind"] == "bytes" else FileTokenizer(values)


def trained_size(choice: str) -> int | None:
    """The size in `train:SIZE`; None for another choice."""
    return int(choice.removeprefix("train:")) if choice.startswith("train:") else None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Byte-pair encoding of bytes, as in GPT-2, trained on texts; its separator is <|endoftext|>."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    def pieces(size: int = 1 << 16) -> Iterator[str]:
        """Texts cut into pieces, which bounds the memory of the trainer."""
        for text in texts:
            for start in range(0, len(text), size):
                yield text[start : start + size]

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(), trainer=trainer)
    return FileTokenizer({"kind": "file", "separator": SEPARATORS[0], "json": tokenizer.to_str()})


@dataclass(frozen=True)
class TextInfo(Info):
    """The vocabulary of a text and the windows in which a model reads it.

    `separator` begins and ends each document, `window` is in tokens, `tokenizer` of `to_dict`; `sizes` counts windows.
    """

    vocab_size: int
    separator: int
    window: int
    tokenizer: dict[str, Any]

    _changed = "another text"  # a few other words may leave as many windows
    _meaning = ("tokenizer", "separator")

    def make_tokenizer(self) -> Tokenizer:
        return tokenizer_from_dict(self.tokenizer)

    def describe(self) -> str:
        return f"a vocabulary of {self.vocab_size}, windows of {self.window} tokens"


class TextStream:
    """Turns tokens into text as they come, up to the first stop string.

    Holds back tokens until their characters are whole, and text that may begin a stop string. `context` are the tokens
    of the text before, by which some tokenizers decide on a blank between words.
    """

    stopped = False  # by a stop string

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._waiting: list[int] = []
        self._held = ""  # may begin a stop string
        self._context = list(context)[-_CONTEXT:]
        # A cut inside a character makes all of Llama's byte tokens up to the next other token invalid.
        while tokenizer.decode(self._context).startswith(_NO_CHARACTER):
            del self._context[0]

    def push(self, token: int) -> str:
        """The text that a token completes, possibly none."""
        self._waiting.append(token)
        text = self._text()
        return "" if text.endswith(_NO_CHARACTER) else self._show(text)

    def finish(self) -> str:
        """The rest of the text, with U+FFFD for bytes that form no character."""
        return self._show(self._text()) + self._held

    def _text(self) -> str:
        """The text of the tokens that wait."""
        before, whole = (self._tokenizer.decode(tokens) for tokens in (self._context, self._context + self._waiting))
        # Invalid byte tokens also make the valid ones before them invalid.
        return whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(self._waiting)

    def _show(self, text: str) -> str:
        """What can be shown when `text`, of the tokens that wait, comes after the text that is held."""
        if text:
            self._context, self._waiting = self._waiting, []
        text = self._held + text
        begun = (size for stop in self._stops for size in range(len(stop)) if text.endswith(stop[:size]))
        found = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        self.stopped = found is not None
        count = len(text) - max(begun, default=0) if found is None else found
        self._held = "" if self.stopped else text[count:]
        return text[:count]
