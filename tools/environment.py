"""The environment variable that shows full tracebacks."""

from __future__ import annotations

import os

TRACEBACK = "LONGSEQ_TRACEBACK"


def wants_traceback() -> bool:
    """True if errors are shown with their traceback."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")
