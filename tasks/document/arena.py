"""The tasks of Long Range Arena as sources of documents: ListOps, images as sequences of pixels, and pairs of texts.

The arena's task on text is data=imdb, cut after 4,000 bytes.

Source: Long Range Arena (Tay et al., 2020), section 2.2, and the reading of the files in its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from longseq.tasks import registry
from longseq.tasks.data.generators import CLOSE, IGNORED, draw, listops
from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.document.sources import Opened, Reader, Sample, Source, register
from longseq.tasks.text.sources import Malformed, Place
from longseq.tasks.text.store import stamp

if TYPE_CHECKING:
    from longseq.tasks.document.config import DocumentDataKeys

SPLITS = ("train", "validation", "test")

# The numbers of ListOps' expressions in the arena.
EXPRESSIONS = {"train": 96_000, "validation": 2_000, "test": 2_000}

# The token with which each text of a pair begins, behind the 256 bytes.
BEGIN = 256
TEXT_BYTES = 4000

LEVELS = 256
HARDEST = "curv_contour_length_14"  # the folder of pathfinder's longest paths, which the arena takes
SHARES = (0.8, 0.9)  # where the training images end, and those of validation


def _listops(keys: DocumentDataKeys) -> Opened:
    """Expressions of the generator of the probe listops; `options` are its own, the numbers of samples, and seed."""
    options = dict(keys.options)
    counts = {split: options.pop(split, count) for split, count in EXPRESSIONS.items()}
    seed = options.pop("seed", 0)
    return Opened(
        {
            split: partial(
                Reader,
                partial(_generate, counts[split], derive_seed(seed, number), options, split),
                stamp=[counts[split], seed, number, sorted(options.items())],
            )
            for number, split in enumerate(SPLITS)
        },
        vocab_size=CLOSE + 1,
    )


def _generate(count: int, seed: int, options: dict[str, Any], split: str) -> Iterator[Sample]:
    random = np.random.default_rng(seed)
    seen: np.ndarray = np.zeros(0, np.uint64)
    block = 2048  # a block of expressions, padded to the longest, takes 64 MB
    for start in range(0, count, block):
        samples, seen = draw(partial(listops, **options), random, min(block, count - start), seen)
        for row, (tokens, labels) in enumerate(zip(samples.tokens, samples.labels, strict=True), start):
            result = labels[labels != IGNORED].item()
            yield Sample(tokens[tokens <= CLOSE], (str(result),), Place(f"listops/{split}", row=row))


def _image(keys: DocumentDataKeys) -> Opened:
    """CIFAR-10 in grey, 1,024 tokens an image; its files are those of data=cifar10, and so are its splits."""

    @cache
    def splits() -> Any:
        image: Any = registry.get("image")
        own = image.config.data(name="cifar10", source="cifar10", img_size=32, root=keys.root)
        data = image.data(own, batch_size=1)
        data.setup()
        return data.splits

    def read(split: str) -> Iterator[Sample]:
        source, indices = getattr(splits(), split).source, getattr(splits(), split).indices
        for index in indices.tolist():
            image, target = source.read(index)
            yield Sample(_levels(image), (source.class_names[target],), Place(source.path(index)))

    known = stamp(str(keys.root))
    return Opened(
        {split: partial(Reader, partial(read, split), stamp=["grey", split, known]) for split in SPLITS},
        vocab_size=LEVELS,
    )


def _levels(image: Image.Image) -> np.ndarray:
    """The grey levels of an image, row by row: `[H W]` uint8."""
    return np.asarray(image.convert("L")).reshape(-1)


def _retrieval(keys: DocumentDataKeys) -> Opened:
    """Pairs of papers of the ACL Anthology Network, and whether one cites the other, from the arena's tsv files.

    A document is both texts, each behind the token `BEGIN` and cut after `options.text_bytes` bytes.
    """
    size = int(keys.options.get("text_bytes", TEXT_BYTES))
    endings = {"train": "train", "validation": "eval", "test": "test"}
    return Opened(
        {split: partial(_find_pairs, Path(keys.root or ""), ending, size) for split, ending in endings.items()},
        vocab_size=BEGIN + 1,
    )


def _find_pairs(root: Path, ending: str, size: int) -> Reader:
    found = sorted(root.glob(f"*{ending}.tsv"))
    if len(found) != 1:
        raise ValueError(f"data.root={root} holds {len(found)} files *{ending}.tsv, not one")
    return Reader(partial(_read_pairs, found[0], size), stamp=[size, str(found[0].resolve()), *stamp(str(found[0]))])


def _read_pairs(path: Path, size: int) -> Iterator[Sample | Malformed]:
    """The lines of label, id1, id2, text1 and text2, with tabs between them and without quotation."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place, cells = Place(str(path), line=number), line.rstrip(b"\r\n").split(b"\t")
            if len(cells) != 5 or cells[0] not in (b"0", b"1", b"0.0", b"1.0") or not all(map(bytes.strip, cells[3:])):
                yield Malformed(place, "not the cells label (0 or 1), id1, id2, text1 and text2")
            else:
                texts = (np.frombuffer(text[:size], np.uint8).astype(np.int64) for text in cells[3:])
                tokens = np.concatenate([part for text in texts for part in ([BEGIN], text)])
                yield Sample(tokens, (chr(cells[0][0]),), place)


def _pathfinder(keys: DocumentDataKeys) -> Opened:
    """Images with two marks, and whether a dashed path joins them; a token a pixel.

    `root` is a folder of one difficulty, which holds metadata/ and imgs/, or the folder of one resolution, whose
    hardest images are then read. A fixed permutation gives 80 % of the images to training, and 10 % each to validation
    and test.
    """
    root = Path(keys.root or "")
    if not (root / "metadata").is_dir():
        root = root / HARDEST
    listing = sorted((root / "metadata").glob("*.npy"))
    if not listing:
        raise ValueError(f"{root}/metadata holds no *.npy")
    return Opened({split: partial(_find_paths, root, listing, split) for split in SPLITS}, vocab_size=LEVELS)


def _find_paths(root: Path, listing: Sequence[Path], split: str) -> Reader:
    stamps = [[path.name, *stamp(str(path))] for path in listing]
    return Reader(partial(_read_paths, root, listing, split), stamp=[str(root.resolve()), split, stamps])


def _read_paths(root: Path, listing: Sequence[Path], split: str) -> Iterator[Sample | Malformed]:
    """The images that the text files `listing` name: in each line the folder, the file, a number, and the label."""
    lines = [
        (path, number, line)
        for path in listing
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
    ]
    order = np.random.default_rng(0).permutation(len(lines))
    first, second = (int(share * len(lines)) for share in SHARES)
    chosen = {"train": order[:first], "validation": order[first:second], "test": order[second:]}[split]
    size: int | None = None
    for index in chosen.tolist():
        path, number, line = lines[index]
        words = line.split()
        if len(words) < 4 or words[3] not in ("0", "1"):
            yield Malformed(Place(str(path), line=number), "not a folder, a file, a number and a label of 0 or 1")
            continue
        file = root / words[0] / words[1]
        try:
            with Image.open(file) as image:
                tokens = _levels(image)
        except OSError as error:  # the published set holds an empty file
            yield Malformed(Place(str(file)), str(error))
            continue
        size = size or len(tokens)
        if len(tokens) != size:
            raise ValueError(f"{file} has {len(tokens)} pixels, and the images before it {size}")
        yield Sample(tokens, (words[3],), Place(str(file)))


_OPENERS: dict[str, tuple[Callable[[DocumentDataKeys], Opened], tuple[str, ...]]] = {
    "lra_listops": (_listops, ("options",)),
    "lra_image": (_image, ("root",)),
    "lra_retrieval": (_retrieval, ("root", "options")),
    "lra_pathfinder": (_pathfinder, ("root",)),
}
for _name, (_open, _reads) in _OPENERS.items():
    register(_name, Source(_open, reads=_reads))
