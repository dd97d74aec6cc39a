"""The shares of the training samples that are set apart for validation and test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any


def same_root(root: str | Sequence[str] | None, other: str | Sequence[str] | None) -> bool:
    """True for two spellings of the same files or folders, in the same order."""
    own, its = ([one] if isinstance(one, str) else list(one or []) for one in (root, other))
    return [os.path.realpath(os.path.expanduser(one)) for one in own] == [
        os.path.realpath(os.path.expanduser(one)) for one in its
    ]


def refuse_larger_shares(shares: Mapping[str, Any], run: Mapping[str, Any], remedy: str) -> None:
    """Raise ValueError, in one line, for a share by which a run would be measured on samples that it was trained on.

    Both are the values of the keys of `data` by which the same samples are divided: of a measurement, and of the run. A
    value that is no number names samples of their own, and a smaller share is a part of what the run set apart.
    """
    for key, share in shares.items():
        own = run[key]
        if isinstance(share, float) and (not isinstance(own, float) or share > own):
            apart = f"{own} of these samples apart" if isinstance(own, float) else "none of these samples apart"
            raise ValueError(
                f"data.{key}={share}: the run set {apart}, and more of them are ones that it was trained on: leave it "
                f"out, or {remedy}"
            )
