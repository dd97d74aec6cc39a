"""Folders that are searched on all levels, also through symbolic links, and paths that are none."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

# The beginning of an address of a file.
_ADDRESS = "file:///"


def refuse_inside(output: str | os.PathLike[str], inputs: Sequence[str], key: str = "output") -> None:
    """Raise ValueError where what is written lies in a folder that is read: the next run would read it, too.

    `key` is the name by which a user gives `output`. An input that is a file, or a name on a hub, holds nothing, and
    folders whose names begin with a dot are not read.
    """
    place = Path(os.path.realpath(output))
    for given in filter(os.path.isdir, inputs):
        folder = os.path.realpath(given)
        if place.is_relative_to(folder) and not any(name.startswith(".") for name in place.relative_to(folder).parts):
            raise ValueError(
                f"{key}={output} lies in the folder {given}, which is read: the next run would read what is written "
                "there, too; give a folder outside of it"
            )


def refuse_pipe(path: str | os.PathLike[str], named: str) -> None:
    """ValueError for a path that is neither a folder nor a file: a pipe, a device or a socket. `named` is its key."""
    if os.path.exists(path) and not (os.path.isdir(path) or os.path.isfile(path)):
        raise ValueError(f"{named} is a pipe or a device, which can be read once only: give a folder or a file")


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


def class_name(folder: str) -> str:
    """The name of a folder, which names a class, as the files of a run hold it; see `written_name`.

    Bytes that are no UTF-8 stay as Python has decoded them, and `is_unicode` tells of those that it could not decode.
    """
    name = os.path.basename(folder)
    try:
        return os.fsencode(name).decode("utf-8")
    except UnicodeError:  # also of a name in an archive that says its encoding, with letters that the locale lacks
        return name


def is_unicode(name: str) -> bool:
    """Whether the files of a run can hold a name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def named_file(name: str) -> str:
    """The path that a file holds: the inverse of `written_name`."""
    return os.fsdecode(unquote_to_bytes(name.removeprefix("file://"))) if name.startswith(_ADDRESS) else name


def leads_above(path: str) -> bool:
    """True for a link to a folder on the way to the link, below which everything would be found again.

    The way is the path as it is written, which may itself go through links: two that lead to each other's folder make a
    circle.
    """
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return any(Path(os.path.realpath(folder)).is_relative_to(target) for folder in Path(path).parents)
