"""Folders that are searched on all levels, also through symbolic links."""

import os
from pathlib import Path


def leads_above(path: str) -> bool:
    """True for a link to a folder on the way to the link, below which everything would be found again.

    The way is the path as it is written, which may itself go through links: two that lead to each other's folder make a
    circle.
    """
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return any(Path(os.path.realpath(folder)).is_relative_to(target) for folder in Path(path).parents)
