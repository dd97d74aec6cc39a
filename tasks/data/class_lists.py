"""The lists of classes that the files of a Hugging Face data set declare, which must number the classes alike."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any


def require_one_list(
    told: str,
    path: str,
    splits: Collection[str],
    *,
    column: str = "label",
    configuration: str | None = None,
    root: str | None = None,
) -> None:
    """Raise ValueError where two local parquet or arrow files of a data set give one number to different classes.

    The library datasets takes the names of the first file, and the numbers of each file as they stand. Lists whose
    names are the numbers themselves are not compared, and the last classes may be missing. `told` is the data set as
    the user gave it, and `root` the folder of the library's cache.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(path, configuration, cache_dir=root)
        files = {str(split): list(files) for split, files in builder.config.data_files.items()}
    except Exception:  # the library raises many kinds, and again where it reads the data
        return
    # A split may be a part or a sum, such as train[:90%] or train+validation.
    wanted = {part.partition("[")[0].strip() for split in splits for part in split.split("+")}
    known: tuple[str, list[str]] | None = None
    for number, (split, paths) in enumerate(files.items()):
        for index, file in enumerate(paths):
            if (split not in wanted and number + index) or "://" in file or not file.endswith((".parquet", ".arrow")):
                continue
            names = _declared(file, column)
            if names == [str(number) for number in range(len(names))]:
                continue
            if known is not None and any(one != other for one, other in zip(known[1], names, strict=False)):
                raise ValueError(f"{told}: {known[0]} and {file} number the classes of their column {column} otherwise")
            if known is None or len(names) > len(known[1]):
                known = file, names


def _declared(file: str, column: str) -> list[str]:
    """The names of classes that datasets has written into the schema of a file; empty if there are none."""
    import pyarrow.parquet

    if file.endswith(".parquet"):
        schema = pyarrow.parquet.read_schema(file)
    else:
        with pyarrow.OSFile(file) as stream:
            schema = pyarrow.ipc.open_stream(stream).schema
    described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature: Any = described.get("info", {}).get("features", {}).get(column, {})
    while isinstance(feature, list) or "feature" in feature:  # several labels of a sample
        feature = feature[0] if isinstance(feature, list) else feature["feature"]
    # Another program may have put text into the column and kept the names: datasets goes by the text then.
    is_text = column in schema.names and str(schema.field(column).type) in ("string", "large_string")
    return [] if is_text else [str(name) for name in feature.get("names", [])]
