"""Folders that are searched on all levels, also through symbolic links."""

import os
from pathlib import Path


def leads_above(path: str) -> bool:
    """True for a link to a folder that holds the link, below which everything would be found again."""
    return os.path.islink(path) and Path(os.path.realpath(os.path.dirname(path))).is_relative_to(os.path.realpath(path))
