"""What a tokenizer loses: texts that differ from the text of their tokens, as of one that makes all letters small.

And what it may not have been meant to do: names of special tokens in a text, as of chats, are ordinary text.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from longseq.tasks.text.tokenizer import FileTokenizer, Tokenizer
from longseq.tokenizer_files import TOKENIZER_FILE

# Documents that are compared, and the characters of each that are.
_DOCUMENTS = 256
_CHARACTERS = 10_000
# Characters around the first difference that a message shows.
_SHOWN = 20


def describe_loss(texts: Iterable[str], tokenizer: Tokenizer) -> str | None:
    """How many of the first texts do not come back from their tokens, or hold names of special tokens; or None."""
    if not isinstance(tokenizer, FileTokenizer):  # bytes lose nothing
        return None
    given = [text[:_CHARACTERS] for text in islice(texts, _DOCUMENTS)]
    found = [tokenizer.decode(tokens.tolist()) for tokens in tokenizer.encode_all(given)]
    changed = [pair for pair in zip(given, found, strict=True) if pair[0] != pair[1]]
    told = []
    if changed:
        before, after = _around_difference(*changed[0])
        told.append(
            f"{len(changed)} of {len(given)} compared documents do not come back from their tokens: the tokenizer "
            f"turns {before!r} into {after!r}"
        )
    named = [text for text in given if any(name in text for name in tokenizer.special_names)]
    if named:
        example = next(name for name in tokenizer.special_names if name in named[0])
        told.append(
            f"{len(named)} of {len(given)} compared documents hold names of special tokens, such as {example}, which "
            f'are read as ordinary text: where a name is to be its token, set "special": false beside it in '
            f"{TOKENIZER_FILE}"
        )
    return "; ".join(told) or None


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """The parts of two texts from shortly before their first difference."""
    place = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    start = max(0, (min(len(one), len(other)) if place is None else place) - _SHOWN // 2)
    return one[start : start + _SHOWN], other[start : start + _SHOWN]
