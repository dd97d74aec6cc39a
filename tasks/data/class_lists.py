"""The lists of classes that the files of a Hugging Face data set declare, which must number the classes alike."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

_NUMBERS = ("int", "uint", "float", "double")  # pyarrow's types of labels that are numbers


class ClassList(NamedTuple):
    """The classes of a file in the order of their numbers; `names` is empty if the file declares none."""

    file: str
    split: str
    names: list[str]


def require_one_list(
    told: str,
    path: str,
    splits: Collection[str],
    *,
    column: str = "label",
    configuration: str | None = None,
    root: str | None = None,
) -> None:
    """Raise ValueError, in one line, where two files of a data set give one number to different classes.

    The library datasets takes the names of the first file, and the numbers of each file as they stand. So the files of
    `splits` and that first one are compared, if they are parquet or arrow files. Lists whose names are the numbers
    themselves are not compared, and the last classes may be missing. `told` is the data set as the user gave it, and
    `root` the folder of the library's cache.
    """
    known: ClassList | None = None
    for found in _class_lists(path, configuration, root, splits, column):
        if found.names == [str(number) for number in range(len(found.names))]:
            continue
        if known is not None:
            _refuse_other_numbers(told, path, known, found)
        if known is None or len(found.names) > len(known.names):
            known = found


def _refuse_other_numbers(told: str, path: str, known: ClassList, found: ClassList) -> None:
    for number, (name, other) in enumerate(zip(known.names, found.names, strict=False)):
        if name != other:
            one, two = (f"{_below(path, each.file)} (split {each.split})" for each in (known, found))
            raise ValueError(
                f"{told}: class {number} is {name!r} in {one}, and {other!r} in {two}: a label is a number in the list "
                "of its own file, and all files are read with one list: write all with the same list"
            )


def _below(folder: str, file: str) -> str:
    """A file's path from the folder of the data set on, if it lies there."""
    return file.removeprefix(os.path.abspath(folder) + os.sep)


def _class_lists(
    path: str, configuration: str | None, root: str | None, splits: Collection[str], column: str
) -> Iterator[ClassList]:
    """The lists of the first file and of the files of `splits`; of what cannot be read, the reader itself tells."""
    try:
        import datasets

        builder = datasets.load_dataset_builder(path, configuration, cache_dir=root)
        read = {"parquet": _parquet_schema, "arrow": _arrow_schema}[builder.info.builder_name]
        files = {str(split): list(files) for split, files in builder.config.data_files.items()}
    except Exception:  # the library raises many kinds, also for a missing network
        return
    # A split may be a part or a sum, such as train[:90%] or train+validation.
    wanted = {part.partition("[")[0].strip() for split in splits for part in split.split("+")}
    every = not wanted <= files.keys()  # such as the split all
    for number, (split, paths) in enumerate(files.items()):
        is_wanted = every or split in wanted
        for index, file in enumerate(paths):
            # Of files on the hub, the first of each split: each costs requests, and the hub's own tools write one list.
            if (is_wanted and (index == 0 or not _is_remote(file))) or number == index == 0:
                yield ClassList(file, split, _declared(file, read, column))


def _is_remote(file: str) -> bool:
    return re.match(r"\w+://", file) is not None


def _declared(file: str, read: Callable[[IO[bytes]], Any], column: str) -> list[str]:
    """The names that datasets has written into the schema of a file; only its schema is read."""
    try:
        with _open(file) as stream:
            schema = read(stream)
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        kind = schema.field(column).type
        while hasattr(kind, "value_type"):  # several labels of a sample
            feature, kind = feature[0] if isinstance(feature, list) else feature["feature"], kind.value_type
        # Another program may have put text into the column and kept the names: datasets goes by the text then.
        is_numbered = feature["_type"] == "ClassLabel" and str(kind).startswith(_NUMBERS)
        return [str(name) for name in feature["names"]] if is_numbered else []
    except Exception:  # no names, labels of another kind, damage, or a missing network
        return []


def _open(file: str) -> IO[bytes]:
    if not _is_remote(file):
        return open(file, "rb")
    import fsspec

    return fsspec.open(file, "rb").open()


def _parquet_schema(file: IO[bytes]) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(file)


def _arrow_schema(file: IO[bytes]) -> Any:
    """The schema of a stream, as `save_to_disk` writes it, or of an arrow file."""
    import pyarrow

    try:
        return pyarrow.ipc.open_stream(file).schema
    except (OSError, pyarrow.ArrowInvalid):
        file.seek(0)
        return pyarrow.ipc.open_file(file).schema
