"""Text while it is written: tokens become characters, and a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from longseq.tasks.text.tokenizer import Tokenizer

# Tokens that may wait for the rest of their character; a character of UTF-8 has at most four bytes.
_LONGEST_WAIT = 4


class TextStream:
    """Turns tokens into text as they come; what forms no whole character yet is held back.

    `context` are tokens before the first one, on which some tokenizers' spelling depends (blanks between words).
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Decoded together with what follows: the tokens from `_start` on, of which those up to `_read` were given out.
        self._tokens = list(context)[-_LONGEST_WAIT:]
        self._start, self._read = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """The text that a token completes, possibly none."""
        self._tokens.append(token)
        text = self._new()
        waits = text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._tokens) - self._read < _LONGEST_WAIT
        if waits or not text:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        self._tokens, self._read, self._start = self._tokens[self._start :], self._read - self._start, 0
        return text

    def finish(self) -> str:
        """What is held back at the end, with U+FFFD for bytes that form no character."""
        text = self._new()
        self._read = len(self._tokens)
        return text

    def _new(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        return self._tokenizer.decode(self._tokens[self._start :])[len(before) :]


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
