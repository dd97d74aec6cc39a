"""Labels: from the cells of a file to the names of classes, from these to targets, and how rare each class is."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from longseq.tasks.config import spell, unknown_key

Labels = tuple[str, ...]
Weight = Annotated[float, Field(ge=0)]
# `data.class_weights`: a rule, a number for each class in their order, or numbers by the names of classes.
ClassWeights = Literal["none", "balanced"] | list[Weight] | dict[Any, Weight]

# `data.sampling`: balanced draws each class equally often (see `longseq.tasks.data.sampler.BalancedSampler`).
Sampling = Literal["balanced"] | None

# The column of labels where the user names none.
LABEL_COLUMN = "label"

_NAMED = 5  # of the classes that a message tells

# Pandas writes 1.0 and 0.0 into a column that has empty cells.
FLAGS = dict.fromkeys(("1", "1.0", "true", "yes"), True) | dict.fromkeys(("0", "0.0", "false", "no"), False)


class LabelError(Exception):
    """A label that is wrong. A run stops at it: if it passed over such samples, it could lose a whole class."""


def check_label_keys(
    multi_label: bool, label_column: str | Sequence[str] | None, label_delimiter: str | None, content: tuple[str, str]
) -> None:
    """Raise ValueError, in one line, for keys of `data` about labels that contradict each other.

    `content` is the key of the other column that is read, that of the texts or files, and the name of this column.
    """
    key, column = content
    if column in ([label_column or LABEL_COLUMN] if isinstance(label_column, str | None) else label_column):
        raise ValueError(f"data.{key} and data.label_column both name the column {column!r}")
    if not multi_label and (isinstance(label_column, list | tuple) or label_delimiter is not None):
        raise ValueError("several label columns, and data.label_delimiter, need data.multi_label=true")


def check_balance(sampling: Sampling, class_weights: ClassWeights) -> None:
    """Raise ValueError, in one line, where both keys of `data` make up for the rarity of a class."""
    if sampling == "balanced" and class_weights == "balanced":
        raise ValueError(
            "data.sampling=balanced and data.class_weights=balanced would count a rare class twice: leave one out"
        )


def read_labels(
    values: Sequence[Any], columns: str | Sequence[str], *, multi_label: bool, delimiter: str | None = None
) -> Labels:
    """The labels in the cells `values` of a document, one for each of `columns`.

    A column that is named by text holds a label, or with `multi_label` a list of them, or text in which `delimiter`
    stands between labels. A list of columns, also of one, holds 1 or 0, true or false; their names are the labels.
    ValueError, which names no file, for cells without a label and for several labels where one is expected.
    """
    if not isinstance(columns, str):
        return tuple(column for column, value in zip(columns, values, strict=True) if _flag(column, value))
    column, (value,) = columns, values
    if value is None or (value == "" and not multi_label):
        raise ValueError(f"no label in column {column!r}")
    if multi_label:
        several = value if isinstance(value, list | tuple) else _cut(value, delimiter)
        return tuple(sorted({_name(one, column) for one in several}))
    if isinstance(value, list | tuple):
        raise ValueError(f"a list in column {column!r}: give data.multi_label=true for several labels")
    return (_name(value, column),)


def _cut(value: Any, delimiter: str | None) -> list[Any]:
    if not isinstance(value, str):
        return [value]
    parts = [value] if delimiter is None else value.split(delimiter)
    return [part.strip() for part in parts if part.strip()]


def _flag(column: str, value: Any) -> bool:
    if value is None or value == "" or (isinstance(value, str) and value.isspace()):
        raise ValueError(f"nothing in column {column!r}: write 0 where the label is absent, 1 where it is there")
    found = FLAGS.get("1" if value in (1, True) else "0" if value in (0, False) else str(value).strip().lower())
    if found is None:
        raise ValueError(f"{value!r} in column {column!r}, which holds 1 or 0")
    return found


def _name(value: Any, column: str) -> str:
    """A label as text: numbers without a fraction are whole numbers, whatever the file makes of them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float) and value == value:
        return str(int(value)) if value.is_integer() else str(value)
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"no label in column {column!r}")
    if not isinstance(value, str):
        kind = "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise ValueError(f"{kind} in column {column!r}, where text, a number, true or false is expected")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"no Unicode text in column {column!r}") from None
    return value


def sort_names(names: Iterable[str], key: Callable[[str], Any] | None = None) -> list[str]:
    """The names of classes in their order: by value where all are whole numbers, else by `key` or the alphabet."""
    found = list(set(names))
    numbers = all(name.removeprefix("-").isdecimal() for name in found)
    # Python refuses to read more than 4300 digits as an int.
    return sorted(found, key=lambda name: (Decimal(name), name)) if numbers else sorted(found, key=key)


def name_some(names: Sequence[str]) -> str:
    """The first five of the names, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def targets_of(
    labels: npt.NDArray[np.int64], sets: Sequence[Labels], class_names: Sequence[str], *, multi_label: bool
) -> npt.NDArray[Any]:
    """The targets of documents whose labels are `sets[labels]`: `[N]` int64, or with `multi_label` `[N, C]` float32.

    All labels must be among `class_names`.
    """
    place = {name: index for index, name in enumerate(class_names)}
    if not multi_label:
        table = np.array([place.get(one[0], -1) for one in sets], np.int64)
        return table[labels]
    rows = np.zeros((len(sets), len(class_names)), np.float32)
    for row, one in zip(rows, sets, strict=True):
        row[[place[name] for name in one if name in place]] = 1
    return rows[labels]


def wrong_class(targets: npt.NDArray[Any], classes: int) -> int | None:
    """The position of the first of targets `[N]` that is no number of `classes`; None without one, as of `[N, C]`."""
    wrong = np.flatnonzero((targets < 0) | (targets >= classes))
    return int(wrong[0]) if targets.ndim == 1 and wrong.size else None


def count_classes(targets: npt.NDArray[Any], classes: int) -> list[int]:
    """The samples of each class, from the targets of `targets_of`."""
    counts = np.bincount(targets, minlength=classes) if targets.ndim == 1 else targets.sum(0)
    return [int(count) for count in counts]


def rarest_labels(targets: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """`[N]`, the rarest label of each row of targets `[N, C]` of 0 and 1, -1 for a row without one; classes `[N]` stay.

    Samples of several labels are divided and drawn by it: the rarest is the one that could be missing.
    """
    if targets.ndim == 1:
        return targets.astype(np.int64)
    frequency = np.where(targets > 0, targets.sum(0), np.inf)
    return np.where((targets > 0).any(1), frequency.argmin(1), -1).astype(np.int64)


def number_of_class(target: Any, label: str) -> int:
    """A label as the number of its class. LabelError for one that is no whole number, which would be rounded.

    A column of whole numbers has the type of fractions where pandas wrote it with a missing one.
    """
    is_whole = isinstance(target, float | np.floating) and float(target).is_integer()
    try:
        return int(target) if is_whole else operator.index(target)
    except TypeError as error:
        told = f"{label}: the label {target!r} must be the number of a class; data.class_map numbers others"
        raise LabelError(told) from error


def find_weights(
    choice: ClassWeights, counts: Sequence[int], samples: int, class_names: Sequence[str], *, multi_label: bool
) -> list[float] | None:
    """The weight of each class in the loss, None if all are 1; `counts` are the training samples of each class.

    balanced: `samples / (classes * count)`, whose mean over the samples is 1, or with `multi_label` `(samples - count)
    / count`. A class without samples has the weight 1. ValueError, in one line, for numbers that do not fit the
    classes.
    """
    if choice == "none":
        return None
    if choice == "balanced" and multi_label:  # a label that all samples have keeps a little weight
        return [max(1, samples - count) / count if count else 1.0 for count in counts]
    if choice == "balanced":
        present = sum(count > 0 for count in counts)
        return [samples / (present * count) if count else 1.0 for count in counts]
    if isinstance(choice, Mapping):
        if not choice:
            raise ValueError("data.class_weights={} names no class: give {NAME: NUMBER}, balanced or none")
        # A command line reads 3 and true as a number and a truth value, whatever the classes are called.
        choice = {name if isinstance(name, str) else spell(name): weight for name, weight in choice.items()}
        if unknown := [str(name) for name in choice if name not in class_names]:
            raise ValueError(unknown_key(unknown[0], class_names, "data.class_weights"))
        weights = [float(choice.get(name, 1.0)) for name in class_names]
    else:
        weights = [float(weight) for weight in choice]
    if len(weights) != len(class_names):
        raise ValueError(
            f"data.class_weights={spell(choice)} has {len(weights)} numbers, and there are {len(class_names)} classes: "
            f"give one for each of {', '.join(class_names[:5])}{', ...' * (len(class_names) > 5)}, or NAME: NUMBER"
        )
    if math.fsum(weights) == 0:
        raise ValueError(f"data.class_weights={spell(choice)} leaves nothing to learn: give at least one above 0")
    return weights


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
