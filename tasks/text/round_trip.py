"""What a tokenizer loses: texts that differ from the text of their tokens, as of one that makes all letters small."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from longseq.tasks.text.tokenizer import ByteTokenizer, Tokenizer

# Documents that are compared, and the characters of each that are.
_DOCUMENTS = 256
_CHARACTERS = 10_000
# Characters around the first difference that a message shows.
_SHOWN = 20


def describe_loss(texts: Iterable[str], tokenizer: Tokenizer) -> str | None:
    """How many of the first texts do not come back from their tokens, and an example; None where all of them do."""
    if isinstance(tokenizer, ByteTokenizer):  # bytes lose nothing
        return None
    given = [text[:_CHARACTERS] for text in islice(texts, _DOCUMENTS)]
    found = [tokenizer.decode(tokens.tolist()) for tokens in tokenizer.encode_all(given)]
    changed = [pair for pair in zip(given, found, strict=True) if pair[0] != pair[1]]
    if not changed:
        return None
    before, after = _around_difference(*changed[0])
    return (
        f"{len(changed)} of {len(given)} compared documents do not come back from their tokens: the tokenizer turns "
        f"{before!r} into {after!r}"
    )


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """The parts of two texts from shortly before their first difference."""
    place = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    start = max(0, (min(len(one), len(other)) if place is None else place) - _SHOWN // 2)
    return one[start : start + _SHOWN], other[start : start + _SHOWN]
