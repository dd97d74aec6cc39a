"""Paths as the files of a run hold them."""

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes

# The beginning of an address of a file.
_ADDRESS = "file:///"


def written_name(path: str) -> str:
    """A path as the files of a run hold it, in UTF-8; Python has decoded it by the locale, which may be another.

    One of bytes that are no UTF-8 is written as an address, file:///tmp/caf%E9.png, from which `named_file` reads it.
    """
    try:
        return os.fsencode(path).decode("utf-8")
    except UnicodeEncodeError:  # of an archive that says its encoding: the locale lacks its letters, the files do not
        return path
    except UnicodeDecodeError:
        return Path(path).absolute().as_uri()


def named_file(name: str) -> str:
    """The path that a file holds: the inverse of `written_name`."""
    return os.fsdecode(unquote_to_bytes(name.removeprefix("file://"))) if name.startswith(_ADDRESS) else name
