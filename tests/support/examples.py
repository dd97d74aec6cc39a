"""The blocks of code in a page of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

# A block of code, and the comment before it: why it is not run, or which file it is.
BLOCK = re.compile(r"(?:^<!-- (not run: [^\n]+|test command|file \S+) -->\n+)?^```(\w+)\n(.*?)^```$", re.M | re.S)


class Example(NamedTuple):
    """A block of code of a page: its line, its language, why it is not run, if it is not, and the file that it is."""

    line: int
    language: str
    text: str
    not_run: str | None
    file: str | None


def find_examples(page: Path) -> list[Example]:
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        word, _, name = (match[1] or "").partition(" ")
        line, file = text[: match.start(3)].count("\n"), name if word == "file" else None
        found.append(Example(line, match[2], match[3], None if file else match[1], file))
    assert len(found) == len(re.findall(r"^```\w+$", text, re.M)), f"{page.name}: a block that is not read here"
    return found


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows."""
    for example in find_examples(page):
        if example.file is not None:
            path = folder / example.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(example.text)
