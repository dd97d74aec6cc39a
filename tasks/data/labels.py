"""Labels: from the cells of a file to the names of classes, from these to targets, and how rare each class is."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from longseq.tasks.config import spell, unknown_key

Labels = tuple[str, ...]
Weight = Annotated[float, Field(ge=0)]
# `data.class_weights`: a rule, a number for each class in their order, or numbers by class name.
ClassWeights = Literal["none", "balanced"] | list[Weight] | dict[Any, Weight]

# `data.sampling`: balanced draws each class equally often (see `longseq.tasks.data.sampler.EpochOrder`).
Sampling = Literal["balanced"] | None

LABEL_COLUMN = "label"  # the default
SEVERAL_LABELS = "several label columns, and data.label_delimiter, need data.multi_label=true"

# Pandas writes 1.0 and 0.0 into a column that has empty cells.
FLAGS = dict.fromkeys(("1", "1.0", "true", "yes"), True) | dict.fromkeys(("0", "0.0", "false", "no"), False)


class LabelError(Exception):
    """A wrong label. It ends a run, which could lose a whole class if it skipped such samples."""


def read_labels(
    values: Sequence[Any], columns: str | Sequence[str], *, multi_label: bool, delimiter: str | None = None
) -> Labels:
    """The labels in the cells `values` of a row, one for each of `columns`.

    If `columns` is one name, the cell holds a label; with `multi_label` a list of labels, or text with `delimiter`
    between labels. If it is a list, the cells hold 1 or 0, true or false, and the names of the columns are the labels.
    ValueError for cells without a label, and for several labels if one is expected.
    """
    if not isinstance(columns, str):
        flags = {column: FLAGS.get(str(value).strip().lower()) for column, value in zip(columns, values, strict=True)}
        if wrong := [column for column, flag in flags.items() if flag is None]:
            raise ValueError(f"{values[columns.index(wrong[0])]!r} in column {wrong[0]!r}, which holds 1 or 0")
        return tuple(column for column, flag in flags.items() if flag)
    column, (value,) = columns, values
    if value is None or (value == "" and not multi_label):
        raise ValueError(f"no label in column {column!r}")
    if not multi_label:
        return (_name(value, column),)
    several = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        parts = [value] if delimiter is None else value.split(delimiter)
        several = [part.strip() for part in parts if part.strip()]
    return tuple(sorted({_name(one, column) for one in several}))


def _name(value: Any, column: str) -> str:
    """A label as text; 3.0 is "3"."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"no label in column {column!r}")
    if not isinstance(value, str | int | float):
        raise ValueError(f"a {type(value).__name__} in column {column!r}, which holds text or numbers")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def sort_names(names: Iterable[str], key: Callable[[str], Any] | None = None) -> list[str]:
    """The names of classes in their order: by value if all are whole numbers, else by `key` or the alphabet."""
    found = list(set(names))
    numbers = all(name.removeprefix("-").isdecimal() for name in found)
    return sorted(found, key=lambda name: (int(name), name)) if numbers else sorted(found, key=key)


def name_some(names: Sequence[str]) -> str:
    """The first five names in quotes, and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def targets_of(
    labels: npt.NDArray[np.int64], sets: Sequence[Labels], class_names: Sequence[str], *, multi_label: bool
) -> npt.NDArray[Any]:
    """The targets of samples whose labels are `sets[labels]`: `[N]` int64, or with `multi_label` `[N, C]` float32.

    A label that is not among `class_names` is -1, or in no column.
    """
    place = {name: index for index, name in enumerate(class_names)}
    if not multi_label:
        table = np.array([place.get(one[0], -1) for one in sets], np.int64)
        return table[labels]
    rows = np.zeros((len(sets), len(class_names)), np.float32)
    for row, one in zip(rows, sets, strict=True):
        row[[place[name] for name in one if name in place]] = 1
    return rows[labels]


def count_classes(targets: npt.NDArray[Any], classes: int) -> list[int]:
    """The samples of each class, from the targets of `targets_of`."""
    counts = np.bincount(targets, minlength=classes) if targets.ndim == 1 else targets.sum(0)
    return [int(count) for count in counts]


def rarest_labels(targets: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """`[N]`, the rarest label of each row of targets `[N, C]`, -1 for a row without labels; targets `[N]` unchanged."""
    if targets.ndim == 1:
        return targets.astype(np.int64)
    frequency = np.where(targets > 0, targets.sum(0), np.inf)
    return np.where((targets > 0).any(1), frequency.argmin(1), -1).astype(np.int64)


def number_of_class(target: Any, label: str, classes: int | None = None) -> int:
    """A label as the number of its class. LabelError for one that is not a whole number, or not below `classes`."""
    if not isinstance(target, int | float | np.number) or not float(target).is_integer():
        raise LabelError(f"{label}: the label {target!r} must be the number of a class")
    if classes is not None and not 0 <= target < classes:
        raise LabelError(f"the label {int(target)} is not among the classes 0 to {classes - 1}")
    return int(target)


def find_weights(
    choice: ClassWeights, counts: Sequence[int], samples: int, class_names: Sequence[str], *, multi_label: bool
) -> list[float] | None:
    """The weight of each class in the loss, None if all are 1; `counts` are the training samples of each class.

    balanced: `samples / (classes * count)`, with the mean 1 over the samples; with `multi_label`
    `(samples - count) / count`; 1 without samples. ValueError for numbers that do not fit the classes.
    """
    if choice == "none":
        return None
    if choice == "balanced" and multi_label:  # a label that all samples have keeps a little weight
        return [max(1, samples - count) / count if count else 1.0 for count in counts]
    if choice == "balanced":
        present = sum(count > 0 for count in counts)
        return [samples / (present * count) if count else 1.0 for count in counts]
    if isinstance(choice, Mapping):
        # Hydra reads the class names 3 and true as a number and a truth value.
        choice = {name if isinstance(name, str) else spell(name): weight for name, weight in choice.items()}
        if unknown := [str(name) for name in choice if name not in class_names]:
            raise ValueError(unknown_key(unknown[0], class_names, "data.class_weights"))
        weights = [float(choice.get(name, 1.0)) for name in class_names]
    else:
        weights = [float(weight) for weight in choice]
    if len(weights) != len(class_names):
        raise ValueError(f"data.class_weights has {len(weights)} numbers, and there are {len(class_names)} classes")
    return weights


def require_one_list(
    given: str, path: str, *, column: str = LABEL_COLUMN, configuration: str | None = None, root: str | None = None
) -> None:
    """ValueError if local parquet files of a Hugging Face set declare different lists of classes.

    The library datasets takes the names of the first file, and the numbers of each file as they are.
    """
    import datasets
    import pyarrow.parquet

    found = (datasets.load_dataset_builder(path, configuration, cache_dir=root).config.data_files or {}).values()
    files = [file for listed in found for file in listed if file.endswith(".parquet") and "://" not in file]
    features = [datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(file)).get(column) for file in files]
    if len(lists := {str(one) for one in features if "ClassLabel" in str(one)}) > 1:
        raise ValueError(f"{given}: its files differ in the classes of their column {column}: {', '.join(lists)}")
