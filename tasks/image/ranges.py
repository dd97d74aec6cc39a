"""Training images that use a small part of the values that their files can hold: a model sees them nearly black."""

from __future__ import annotations

import io
import logging
from contextlib import suppress
from typing import Any

from longseq.tasks.data.unreadable import UNREADABLE, LabelError
from longseq.tasks.image.decoding import find_range, open_regular
from longseq.tasks.image.sources import Split

_log = logging.getLogger(__name__)

# The part of the range below which all values of a picture are rarely meant; 12 bits in a file of 16 have a sixteenth.
SMALL_PART = 1 / 8
# So many images are read, evenly spaced.
COMPARED = 200


def warn_of_narrow_ranges(split: Split) -> None:
    """Warn, in one line, of images of 16 bits whose largest value is a small part of their range."""
    compared = split.indices[:: max(1, len(split) // COMPARED)]
    found = {int(index): values for index in compared if (values := _find_range(split.source, int(index))) is not None}
    # nothing is hidden in a picture that is black
    narrow = {index: values for index, values in found.items() if 0 < values[0] < SMALL_PART * values[1]}
    if narrow:
        first, (largest, white) = next(iter(narrow.items()))
        _log.warning(
            "%d of %d training images of 16 bits that were compared have no value above %g %% of their range, such as "
            "%s (%d of %d): they are read nearly black; scale their values, of 12 bits by 16",
            len(narrow),
            len(found),
            100 * SMALL_PART,
            split.source.path(first),
            largest,
            white,
        )


def _find_range(source: Any, index: int) -> tuple[int, int] | None:
    """The largest value of an image and of its range; None for one of 8 bits, and for one that cannot be read."""
    with suppress(*UNREADABLE, LabelError):  # a wrong label is told where it is used
        if getattr(source, "has_files", False):
            with open(source.path(index), "rb", opener=open_regular) as file:
                return find_range(file)
        if hasattr(source, "read_file"):
            return find_range(io.BytesIO(source.read_file(index)[0]))
    return None
