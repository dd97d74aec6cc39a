"""The sources of labelled documents: files, installed libraries, Long Range Arena, and what a program registers.

A registered source gives documents as text, or as tokens without a text:

import numpy as np
from longseq.tasks.document.sources import Reader, Source, register
from longseq.tasks.text.sources import Document, Place

def read(keys):
    for index in range(1000):
        digits = np.array([int(digit) for digit in str(index)])
        yield Document(digits, ("odd" if index % 2 else "even",), Place("numbers", f"row {index}"))

def numbers(keys):
    return {"train": lambda: Reader(lambda: read(keys), stamp=[1000])}

register("numbers", Source(numbers, reads=("validation", "test"), vocab_size=10))  # data.source=numbers

It has training documents only; data.validation and data.test are shares of them.
"""

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from longseq.tasks import registry
from longseq.tasks.data.generators import CLOSE, IGNORED, draw, listops
from longseq.tasks.data.labels import LABEL_COLUMN
from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.document.config import DocumentDataKeys
from longseq.tasks.text.sources import (
    STREAM,
    TEXT,
    Columns,
    Document,
    Found,
    Malformed,
    Part,
    Place,
    find_parts,
    modules_of,
    read_part,
)
from longseq.tasks.text.store import SPLITS, stamp


class Reader(NamedTuple):
    """The documents of a split; `stamp`, of lists, text and numbers, changes when they change."""

    read: Callable[[], Found]
    stamp: Any


Splits = Mapping[str, Callable[[], Reader]]


class Source(NamedTuple):
    """A source of labelled documents.

    open: functions that find the documents of train, and of validation and test unless they are shares of train.
    reads: which of these keys it reads: root, train, text_column, label_column, label_delimiter, tokenizer, separator,
        options; and validation and test, where these can be shares of train.
    prepare: what the source does to each text, which `longseq predict` does as well.
    vocab_size: the number of tokens of a source of tokens; None for text.
    """

    open: Callable[[DocumentDataKeys], Splits]
    reads: tuple[str, ...] = ()
    prepare: Callable[[str], str] | None = None
    vocab_size: int | None = None


TEXT_KEYS = ("tokenizer", "separator", "validation", "test")
FILE_KEYS = ("root", "train", "text_column", "label_column", "label_delimiter", *TEXT_KEYS)

SOURCES: dict[str, Source] = {}


def register(name: str, source: Source) -> None:
    """Add a source. ValueError for a name that another source has."""
    if SOURCES.get(name, source) is not source:
        raise ValueError(f"the source {name!r} is there already")
    SOURCES[name] = source


def find(name: str) -> Source:
    """The source that `data.source` names."""
    if name not in SOURCES:
        raise ValueError(f"data.source={name} is unknown: choose one of {', '.join(sorted(SOURCES))}")
    return SOURCES[name]


# --- files


def _open_files(keys: DocumentDataKeys) -> Splits:
    """Files and folders: only `root`, or `train`, `validation` and `test` below it."""
    splits = {"train": partial(_find_files, keys, keys.train)}
    for name in ("validation", "test"):
        if isinstance(given := getattr(keys, name), str):
            splits[name] = partial(_find_files, keys, given)
    return splits


def _find_files(keys: DocumentDataKeys, given: str | None) -> Reader:
    path = keys.root or ""
    if given is not None and path.startswith(STREAM) and not os.path.isabs(given):
        path = f"{path}@{given}"
    elif given is not None:
        path = os.path.join("" if os.path.isfile(path) else path, given)
    if not path:
        raise ValueError("data.root=PATH or data.train=PATH names the documents")
    if not path.startswith(STREAM):
        path = os.path.realpath(path)
    if given is None and os.path.isdir(path) and any(name.partition(".")[0] == "train" for name in os.listdir(path)):
        raise ValueError(f"{path} holds several splits: name them by data.train, data.validation and data.test")
    text, labels = keys.text_column or TEXT.text, keys.label_column or LABEL_COLUMN
    columns = Columns(text, None, labels, keys.multi_label, keys.label_delimiter)
    parts = find_parts([path], columns)

    def read() -> Found:
        for part in parts:
            for one in read_part(part, columns):
                if part.files and isinstance(one, Document):  # in a class folder
                    folders = Path(one.place.path).relative_to(path).parts
                    yield one._replace(labels=folders[:1]) if len(folders) > 1 else Malformed(one.place, "no label")
                else:
                    yield one

    return Reader(read, stamp=[path, *([part.version, part.stamps()] for part in parts)])


# --- Python files of eight installed libraries, which are the classes: real documents that every install has

LIBRARIES = ("lightning", "networkx", "scipy", "sklearn", "sympy", "timm", "torch", "torchmetrics")
_SHORTEST = 1000  # bytes of a file
_MOST = 320  # files of a library, so that the classes have similar sizes

# Also names in prose and of packages inside the libraries, longer names first, since they contain shorter ones.
# The lookahead at the first letter makes the search three times as fast.
_NAMES = re.compile(
    "(?=[lnpst])(?:pytorch[-_ ]?lightning|torch[-_ ]?metrics|torch[-_ ]?vision|torch[-_ ]?audio|"
    "scikit[-_ ]?learn|lightning|networkx|py[-_ ]?torch|torch|sklearn|scipy|sympy|timm)",
    re.IGNORECASE,
)
_IMPORTS = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]*(?:\([^)]*\)|(?:[^\n]*\\\n)*[^\n]*)|"
    r"import[ \t]+(?:[^\n]*\\\n)*[^\n]*)[^\n]*\n?",
    re.MULTILINE,
)
_HEAD = re.compile(r"\A(?:[ \t]*(?:#[^\n]*)?\n)*")
_COPYRIGHT = re.compile(r"^[^\n]*(?:copyright|licen[cs]e)[^\n]*\n?", re.IGNORECASE | re.MULTILINE)


def conceal(source: str) -> str:
    """A Python file without what gives its library away.

    Imports, comments at the beginning and lines with a copyright are removed; the names of libraries become "library".
    """
    text = _HEAD.sub("", source, count=1)
    text = _COPYRIGHT.sub("", _IMPORTS.sub("", text))
    return _NAMES.sub("library", text)


def find_libraries() -> dict[str, list[str]]:
    """The files of each library, in the order of their paths."""
    found = {}
    for name in LIBRARIES:
        spec: Any = importlib.util.find_spec(name)
        root = spec.submodule_search_locations[0]
        files = sorted(path for path in modules_of(root) if os.path.getsize(path) >= _SHORTEST)
        # Hashes of the paths below the library's folder select the same files on every machine.
        chosen = sorted(files, key=lambda path, root=root: _hash_path(os.path.relpath(path, root)))[:_MOST]  # type: ignore[misc]
        found[name] = sorted(chosen)
    return found


def _hash_path(path: str) -> bytes:
    return hashlib.blake2b(Path(path).as_posix().encode(), digest_size=8).digest()


def _open_libraries() -> Reader:
    parts = [Part("python", name, files=tuple(paths)) for name, paths in find_libraries().items()]

    def read() -> Found:
        for part in parts:
            for one in read_part(part, TEXT):
                if isinstance(one, Malformed):
                    yield one
                elif len(text := conceal(one.text)) >= _SHORTEST // 2:
                    yield Document(text, (part.path,), one.place)

    stamps = (stamp for part in parts for stamp in part.stamps())
    return Reader(read, stamp=[_hash_path(_NAMES.pattern).hex(), *stamps])


# --- Long Range Arena (Tay et al., 2020), section 2.2; files are read as in its code. Its task on text is data=imdb

_BEGIN = 256  # the token before each text of a pair, after the 256 bytes
_LEVELS = 256  # of grey


def _listops(keys: DocumentDataKeys) -> Splits:
    """Expressions of the probe listops; `options` are the generator's options, the number of samples, and seed."""
    options = dict(keys.options)
    counts = [options.pop(split, count) for split, count in zip(SPLITS, (96_000, 2_000, 2_000), strict=True)]
    seed = options.pop("seed", 0)
    splits = {}
    for number, (split, count) in enumerate(zip(SPLITS, counts, strict=True)):
        read = partial(_generate, count, derive_seed(seed, number), options, split)
        splits[split] = partial(Reader, read, stamp=[count, seed, number, sorted(options.items())])
    return splits


def _generate(count: int, seed: int, options: dict[str, Any], split: str) -> Found:
    random = np.random.default_rng(seed)
    seen: np.ndarray = np.zeros(0, np.uint64)
    block = 2048  # a block of expressions, padded to the longest, takes 64 MB
    for start in range(0, count, block):
        samples, seen = draw(partial(listops, **options), random, min(block, count - start), seen)
        for row, (tokens, labels) in enumerate(zip(samples.tokens, samples.labels, strict=True), start):
            result = labels[labels != IGNORED].item()
            yield Document(tokens[tokens <= CLOSE], (str(result),), Place(f"listops/{split}", f"row {row}"))


def _image(keys: DocumentDataKeys) -> Splits:
    """CIFAR-10 in grey, 1,024 tokens an image, with the splits of data=cifar10; root may also have class folders."""
    source = "folder" if os.path.isdir(os.path.join(keys.root or "", "train")) else "torch/cifar10"

    def read(split: str) -> Found:
        task: Any = registry.get("image")
        splits = {"val_split": None, "test_split": "test"}
        own = task.config.data(name="cifar10", source=source, img_size=32, root=keys.root, **splits)
        data = task.data(own, batch_size=1)
        data.setup()
        found = data.splits["val" if split == "validation" else split]
        for index in found.indices.tolist():
            image, target = found.source.read(index)
            labels = (found.source.class_names[target],)
            yield Document(_grey_levels(image), labels, Place(found.source.path(index)))

    known = stamp(str(keys.root))
    return {split: partial(Reader, partial(read, split), stamp=["grey", split, known]) for split in SPLITS}


def _grey_levels(image: Image.Image) -> np.ndarray:
    """The grey levels of an image, row by row: `[H W]` uint8."""
    return np.asarray(image.convert("L")).reshape(-1)


def _retrieval(keys: DocumentDataKeys) -> Splits:
    """Pairs of papers of the ACL Anthology Network, and whether one cites the other, from the arena's tsv files.

    A document is both texts, each after the token `_BEGIN` and truncated to `options.text_bytes` bytes.
    """
    root, size = Path(keys.root or ""), int(keys.options.get("text_bytes", 4000))

    def find_pairs(ending: str) -> Reader:
        found = list(root.glob(f"*{ending}.tsv"))
        if len(found) != 1:
            raise ValueError(f"data.root={root} holds {len(found)} files *{ending}.tsv, not one")
        path = found[0]
        return Reader(partial(_read_pairs, path, size), stamp=[size, str(path.resolve()), *stamp(str(path))])

    endings = {"train": "train", "validation": "eval", "test": "test"}
    return {split: partial(find_pairs, ending) for split, ending in endings.items()}


def _read_pairs(path: Path, size: int) -> Found:
    """The lines of label, id1, id2, text1 and text2, separated by tabs and without quotes."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place, cells = Place(str(path), f"line {number}"), line.rstrip(b"\r\n").split(b"\t")
            if len(cells) != 5 or cells[0] not in (b"0", b"1", b"0.0", b"1.0") or not all(map(bytes.strip, cells[3:])):
                yield Malformed(place, "not the cells label (0 or 1), id1, id2, text1 and text2")
            else:
                texts = (np.frombuffer(text[:size], np.uint8).astype(np.int64) for text in cells[3:])
                tokens = np.concatenate([part for text in texts for part in ([_BEGIN], text)])
                yield Document(tokens, (chr(cells[0][0]),), place)


def _pathfinder(keys: DocumentDataKeys) -> Splits:
    """Images with two marks, and whether a dashed path joins them; a token is a pixel.

    `root` is a folder of one difficulty, with metadata/ and imgs/, or the folder of one resolution, whose hardest
    images are read. A fixed permutation gives 80 % of the images to training, and 10 % each to validation and test.
    """
    root = Path(keys.root or "")
    if not (root / "metadata").is_dir():
        root = root / "curv_contour_length_14"
    listing = sorted((root / "metadata").glob("*.npy"))
    stamps = [str(root.resolve()), *([path.name, *stamp(str(path))] for path in listing)]
    readers = {split: Reader(partial(_read_paths, root, listing, split), stamp=[split, *stamps]) for split in SPLITS}
    return {split: partial(readers.__getitem__, split) for split in SPLITS}


def _read_paths(root: Path, listing: list[Path], split: str) -> Found:
    """The images that the text files `listing` name; a line begins with folder, file, number and label."""
    lines = [
        (path, number, line)
        for path in listing
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    ]
    order = np.random.default_rng(0).permutation(len(lines))
    first, second = int(0.8 * len(lines)), int(0.9 * len(lines))
    chosen = {"train": order[:first], "validation": order[first:second], "test": order[second:]}[split]
    for index in chosen.tolist():
        path, number, line = lines[index]
        words = line.split()
        if len(words) < 4 or words[3] not in ("0", "1"):
            yield Malformed(Place(str(path), f"line {number}"), "not a folder, a file, a number and a label of 0 or 1")
            continue
        file = root / words[0] / words[1]
        try:
            with Image.open(file) as image:
                yield Document(_grey_levels(image), (words[3],), Place(str(file)))
        except OSError as error:  # the published set holds an empty file
            yield Malformed(Place(str(file)), str(error))


register("files", Source(_open_files, reads=FILE_KEYS))
register("libraries", Source(lambda keys: {"train": _open_libraries}, reads=TEXT_KEYS, prepare=conceal))
register("lra_listops", Source(_listops, reads=("options",), vocab_size=CLOSE + 1))
register("lra_image", Source(_image, reads=("root",), vocab_size=_LEVELS))
register("lra_retrieval", Source(_retrieval, reads=("root", "options"), vocab_size=_BEGIN + 1))
register("lra_pathfinder", Source(_pathfinder, reads=("root",), vocab_size=_LEVELS))
