"""Text while it is written: tokens become characters, and a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from longseq.tasks.text.tokenizer import Tokenizer

# Tokens that may wait for the rest of their character; a character of UTF-8 has at most four bytes.
_LONGEST_WAIT = 4
# Tokens that are decoded again with those that follow, while no character is whole.
_LONGEST_CONTEXT = 32
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text as they come; what forms no whole character yet is held back.

    `context` are tokens before the first one, on which some tokenizers' spelling depends (blanks between words).
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Decoded together with what follows; those up to `_read` were given out.
        self._tokens = list(context)[-_LONGEST_WAIT:]
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        """The text that a token completes, possibly none."""
        self._tokens.append(token)
        text = self._new()
        waiting = len(self._tokens) - self._read
        if not text:
            return ""
        if not text.endswith(_NO_CHARACTER):
            return self._give(waiting)
        if waiting < _LONGEST_WAIT:
            return ""
        # The first of these tokens is no part of a character. The last ones may still begin one: they wait on.
        whole = self._tokenizer.decode(self._tokens)
        return self._give(next(n for n in range(1, waiting + 1) if whole.startswith(self._before(n))))

    def finish(self) -> str:
        """What is held back at the end, with U+FFFD for bytes that form no character."""
        return self._give(len(self._tokens) - self._read)

    def _new(self) -> str:
        return self._tokenizer.decode(self._tokens)[len(self._before(0)) :]

    def _before(self, count: int) -> str:
        """The text of what was given out and of the first `count` tokens that wait."""
        return self._tokenizer.decode(self._tokens[: self._read + count])

    def _give(self, count: int) -> str:
        """The text of the first `count` tokens that wait; it becomes the context of what follows."""
        before = self._before(count)
        text = before[len(self._before(0)) :]
        # Bytes that are no character may count as one with those before them, which stay until a character is whole.
        forgotten = 0 if before.endswith(_NO_CHARACTER) and self._read < _LONGEST_CONTEXT else self._read
        self._tokens, self._read = self._tokens[forgotten:], self._read + count - forgotten
        return text


class StopStrings:
    """Passes text on up to the first of the stop strings, and holds back what may be the beginning of one.

    `before` is text that was shown before, in which a stop string may have begun.
    """

    def __init__(self, stops: Sequence[str], before: str = "") -> None:
        if "" in stops:
            raise ValueError("stop: a stop string is empty; give text that ends the output")
        self._stops = list(stops)
        begun = max((_overlap(before, stop) for stop in self._stops), default=0)
        self._held = before[len(before) - begun :]
        self._shown = begun  # characters of what is held that were shown before
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be shown. After a stop string `stopped` is True, and nothing follows."""
        if self.stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._show(min(found), "")
        begun = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        keep = len(self._held) - begun
        return self._show(keep, self._held[keep:])

    def finish(self) -> str:
        """What is held back at the end."""
        return self._show(len(self._held), "")

    def _show(self, count: int, held: str) -> str:
        """The first characters of what is held, without those that were shown before."""
        shown = self._held[self._shown : count]
        self._shown = max(self._shown - count, 0)
        self._held = held
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
