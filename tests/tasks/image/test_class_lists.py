"""Files of Hugging Face data sets that each declare a list of classes."""

import io

import numpy as np
import pytest
from PIL import Image

from longseq.tasks.data.labels import require_one_list

datasets = pytest.importorskip("datasets", reason="Hugging Face sources need longseq[datasets]")
pytestmark = pytest.mark.slow

NAMES = ["cat", "dog", "emu"]
OTHERS = ["dog", "cat", "emu"]


def rows_of(names, kind=None):
    """Twelve images whose shade is that of their class by name."""
    pictures = []
    for number in range(12):
        stream = io.BytesIO()
        shade = 80 * NAMES.index(names[number % 3]) + number if names else number
        Image.fromarray(np.full((16, 16, 3), shade, dtype=np.uint8)).save(stream, "PNG")
        pictures.append({"bytes": stream.getvalue(), "path": None})
    label = kind or datasets.ClassLabel(names=names)
    values = [name for name in names for _ in range(4)] if kind == datasets.Value("string") else [0, 1, 2] * 4
    features = datasets.Features({"image": datasets.Image(), "label": label})
    return datasets.Dataset.from_dict({"image": pictures, "label": values}, features=features)


def write(folder, train, validation):
    for split, rows in (("train", train), ("validation", validation)):
        rows.to_parquet(folder / f"{split}.parquet")
    return folder


def check(folder, cache):
    require_one_list(f"data.source=hfds/{folder}", str(folder), root=str(cache))


def test_files_that_number_classes_otherwise_are_refused(tmp_path):
    """The library datasets gives the names of the training images to both splits."""
    folder = write(tmp_path / "data", rows_of(NAMES), rows_of(OTHERS))
    with pytest.raises(ValueError, match="differ in the classes of their column label"):
        check(folder, tmp_path)
    same = write(tmp_path / "same", rows_of(NAMES), rows_of(NAMES))
    check(same, tmp_path)
