"""Truncation: the tokens of a long document that a model reads."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Truncation = Literal["none", "head", "tail", "head_tail", "middle"]


def truncate(
    tokens: npt.NDArray[np.integer[Any]], max_length: int | None, truncation: str, separator: int | None
) -> npt.NDArray[np.integer[Any]]:
    """At most `max_length` tokens of a document: all of a shorter one.

    `head` takes the first tokens, `tail` the last ones, `head_tail` half of both (of an odd number, one more of the
    first ones), `middle` those around the middle. A document that begins with `separator` still does, whatever is taken
    behind it. `none` takes all tokens.
    """
    if truncation == "none" or max_length is None or len(tokens) <= max_length:
        return tokens
    begin = int(separator is not None and tokens[0] == separator)
    first, text, room = tokens[:begin], tokens[begin:], max_length - begin
    if truncation == "head":
        return tokens[:max_length]
    if truncation == "tail":
        return np.concatenate([first, text[len(text) - room :]])
    if truncation == "head_tail":
        head = -(-room // 2)
        return np.concatenate([first, text[:head], text[len(text) - (room - head) :]])
    if truncation == "middle":
        start = (len(text) - room) // 2
        return np.concatenate([first, text[start : start + room]])
    raise ValueError(f"truncation={truncation} is unknown: choose none, head, tail, head_tail or middle")


def crop(
    tokens: npt.NDArray[np.integer[Any]], max_length: int, separator: int | None, random: np.random.Generator
) -> npt.NDArray[np.integer[Any]]:
    """`max_length` neighbouring tokens of a document from a random place on: all of a shorter one.

    A document that begins with `separator` still does.
    """
    if len(tokens) <= max_length:
        return tokens
    begin = int(separator is not None and tokens[0] == separator)
    start = begin + int(random.integers(len(tokens) - max_length + 1))
    return np.concatenate([tokens[:begin], tokens[start : start + max_length - begin]])


def truncated_length(length: Any, max_length: int | None, truncation: str) -> Any:
    """The tokens that `truncate` leaves of documents with `length` tokens, a number or an array."""
    return length if truncation == "none" or max_length is None else np.minimum(length, max_length)
