"""The data module of document classifiers: labelled documents, prepared once, in batches of a token budget."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from longseq.plugins import plugin_of
from longseq.tasks.config import read
from longseq.tasks.data.info import STAGES
from longseq.tasks.data.labels import Labels, count_classes, find_weights, rarest_labels, sort_names, targets_of
from longseq.tasks.data.loader import BatchLoader, TrainingLoader, find_place
from longseq.tasks.data.module import TaskData, refuse_larger_shares, same_root
from longseq.tasks.document import sources
from longseq.tasks.document.batch import DocumentBatches, EveryDocument, PackedSampler, Split
from longseq.tasks.document.config import DocumentDataKeys, DocumentInfo
from longseq.tasks.document.inputs import DocumentFiles
from longseq.tasks.document.model import LINEAR
from longseq.tasks.document.sources import Reader
from longseq.tasks.text import store
from longseq.tasks.text.prepare import Encoded, batched, encode, manifest_of, tokenizer_of
from longseq.tasks.text.sources import Document, Malformed
from longseq.tasks.text.store import SPLITS, Integers, in_cache
from longseq.tasks.text.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    read_tokenizer,
    tokenizer_from_dict,
    train_tokenizer,
    trained_size,
)
from longseq.tasks.training.system import write_text
from longseq.tokenizer_files import same_tokenizer

_BUDGET = 65536  # tokens of a batch in evaluation, if the model was saved without its run

# The only split of a folder of prepared documents, and the list of unreadable documents in it.
_DOCUMENTS, _LEFT_OUT = "documents", "left_out.txt"

# The keys that, with the tokenizer, decide what is prepared.
_PREPARED_BY = {"source", "text_column", "label_column", "label_delimiter", "multi_label", "options"}

_warn = rank_zero_only(logging.getLogger(__name__).warning)


class DocumentData(TaskData):
    """Labelled documents for training, validation and test; `longseq.tasks.document.batch` explains the batches.

    With `source=files`, `root` is a file (jsonl, csv, tsv, parquet), a saved Hugging Face set, a folder of these, or a
    folder with a folder of text files for each class; or `train`, `validation` and `test` name such files below it. See
    `longseq.tasks.document.sources` for other sources, and `longseq.tasks.data.labels` for labels and `class_weights`.

    `validation` and `test` are files, or shares of the training documents, stratified by label (see `divide`). A
    warning counts the documents that are in two splits; `duplicates=drop` removes them from the earlier one of train,
    validation and test. Unreadable documents are left out and listed.
    `sampling=balanced` draws each class equally often, and documents of several labels by the rarest one.

    `tokenizer=train:SIZE` is trained on the training documents. Batch sizes count tokens. The documents of a batch are
    a function of (`seed`, epoch, place in the epoch), and the windows of `random_crops` of (`seed`, epoch, document).
    """

    keys_class, info_class = DocumentDataKeys, DocumentInfo
    inputs = DocumentFiles

    def __init__(self, keys: DocumentDataKeys, *, batch_size: int, seed: int = 0, init: str | None = None) -> None:
        """The checkpoint `init` gives the default tokenizer."""
        super().__init__(keys, batch_size=batch_size, seed=seed)
        self._init = init
        self._wanted = list(STAGES.values())  # the splits to open
        self._trained: DocumentInfo | None = None  # the info of a model, which gives the tokenizer and the classes
        self._is_fitted = False  # by the linear model
        self._source = sources.find(keys.source)
        for name in (*sources.FILE_KEYS, "options"):
            if getattr(keys, name) not in (None, {}) and name not in self._source.reads:
                raise ValueError(f"data.{name} is not read by data.source={keys.source}")
        self.splits: dict[str, Split] = {}  # of train, val and test, after `setup`
        self._samplers: dict[tuple[int, ...], PackedSampler] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> DocumentData:
        """The data of a configuration; `batch_size` counts tokens."""
        keys = read(DocumentDataKeys, config["data"], "data")
        datamodule = cls(keys, batch_size=batch_size, seed=config["seed"], init=config.get("init"))
        datamodule.setup()
        datamodule.take_recipe(config, batch_size)
        return datamodule

    def take_recipe(self, config: Mapping[str, Any], batch_size: int) -> None:
        keys = read(DocumentDataKeys, config["data"], "data")
        for stage, split in self.splits.items():
            self.splits[stage] = split._replace(max_length=keys.max_length, truncation=keys.truncation)
        longest = self.splits["train"].longest
        self._is_fitted = config["model"]["name"] == LINEAR
        if self._is_fitted:
            keys = keys.model_copy(update={"sampling": None, "random_crops": False})
            batch_size = max(batch_size, longest)  # which holds each document
        self.keys, self.batch_size, self.eval_batch_size = keys, batch_size, keys.eval_batch_size or batch_size
        self._info, self._samplers = replace(self.info, window=longest, **self._reading), {}

    @classmethod
    def for_evaluation(
        cls, config: Mapping[str, Any], changes: Mapping[str, Any], *, split: str, trained: Any, batch_size: int
    ) -> DocumentData:
        copied = ("multi_label", "text_column", "max_length", "truncation", "segment")
        given = {"name": "given", "source": "files", **{key: getattr(trained, key) for key in copied}}
        own = config.get("data") or given
        # The model has its tokenizer; the file of the training may be gone.
        own = {**own, "tokenizer": None, "separator": None, "sampling": None, "random_crops": False}
        if changes.get("truncation", own["truncation"]) == "none":
            own["max_length"] = None
        found = dict(changes)
        for name in ("validation", "test"):  # a file in the working folder, not below the root of the training
            file = changes.get(name)
            if isinstance(file, str) and "root" not in changes and os.path.exists(file):
                found[name] = os.path.abspath(file)
        keys = read(DocumentDataKeys, {**own, **found}, "data")
        if keys.multi_label != trained.multi_label:
            raise ValueError(f"the model was trained with data.multi_label={trained.multi_label}")
        if config.get("data"):
            _refuse_trained(keys, read(DocumentDataKeys, config["data"], "data"), STAGES[split])
        budget = (config.get("recipe") or {}).get("batch_size") or _BUDGET
        datamodule = cls(keys, batch_size=budget, seed=config.get("seed", 0))
        # What validation leaves out depends on test.
        drops = split == "val" and keys.duplicates == "drop"
        datamodule._wanted, datamodule._trained = ["validation", "test"] if drops else [STAGES[split]], trained
        datamodule.setup()
        return datamodule

    @property
    def registered_parts(self) -> list[Any]:
        return [self._source.open] if plugin_of(self._source.open) else []

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the training documents that an epoch reads, after truncation."""
        return self.training_sampler().tokens_per_epoch

    def setup(self, stage: str | None = None) -> None:
        """Open the documents, and prepare the tokens that the cache lacks."""
        if self.splits:
            return
        opened, wanted = self._source.open(self.keys), self._wanted
        needed = wanted if all(name in opened for name in wanted) else [*wanted, "train"]
        fractions = self._fractions(opened)
        readers = {name: find() for name, find in opened.items() if name in needed}
        tokenizer = self._choose_tokenizer(readers, fractions)
        found = {name: self._prepare(reader, tokenizer, name) for name, reader in readers.items()}
        numbers = {name: np.arange(one.corpus.documents) for name, one in found.items()}
        if "train" in found and fractions:
            numbers |= divide(found["train"], fractions, multi_label=self.keys.multi_label)
            found |= {name: found["train"] for name in fractions}
        found = {name: one for name, one in found.items() if name in wanted}
        for path in sorted({one.folder / _LEFT_OUT for one in found.values()}):
            if lines := path.read_text(encoding="utf-8").splitlines():
                _warn(f"{len(lines)} documents cannot be read and are left out ({path}): {'; '.join(lines[:3])}")
        self._find_repeats(found, numbers)
        for name in found:
            if not len(numbers[name]):
                raise ValueError(f"the {name} split has no document")
        self._finish(found, numbers, tokenizer)

    def train_dataloader(self) -> TrainingLoader:
        sampler = copy.copy(self.training_sampler())  # the loader counts epochs in it
        crops = self.seed if self.keys.random_crops else None
        batches = DocumentBatches(self.splits["train"], self.batch_size, sampler.longest, crops=crops)
        return self.training_loader(batches, sampler)

    def evaluation_loader(self, stage: str) -> BatchLoader:
        rank, world_size, _ = find_place(self.trainer)
        lengths = self.splits[stage].lengths
        # Without a chosen budget, a document may be longer than a training batch.
        budget = self.keys.eval_batch_size or max(self.batch_size, int(lengths.max()))
        sampler = EveryDocument(lengths, budget, rank=rank, world_size=world_size)
        batches = DocumentBatches(self.splits[stage], budget, sampler.longest)
        return BatchLoader(batches, sampler, **self.loader_options())

    def training_sampler(self) -> PackedSampler:
        """The sampler of training, made once for each place, since it packs all documents."""
        place, train = find_place(self.trainer), self.splits["train"]
        if (key := (self.batch_size, *place)) not in self._samplers:
            lengths = np.minimum(train.lengths, self.keys.max_length) if self.keys.random_crops else train.lengths  # type: ignore[arg-type]
            if self._is_fitted:  # the fit reads the documents by itself: a batch may have any one of them
                lengths = np.full_like(lengths, self.batch_size)
            options = {"seed": self.seed, **place._asdict()}
            classes = None if self.keys.sampling is None else rarest_labels(train.targets)
            self._samplers[key] = PackedSampler(lengths, self.batch_size, classes=classes, **options)
        return self._samplers[key]

    def _fractions(self, given: Collection[str]) -> dict[str, float]:
        """The shares of training documents for the splits that the source does not have."""
        found = {}
        for name in ("validation", "test"):
            value = getattr(self.keys, name)
            if name in given or (value is None and name not in self._wanted):
                continue
            if not isinstance(value, float):
                raise ValueError(f"data.{name}={value}: give a file, or the share of the training documents")
            found[name] = value
        return found

    def _choose_tokenizer(self, readers: Mapping[str, Reader], fractions: Mapping[str, float]) -> Tokenizer | Bare:
        trained, choice, own = self._trained, self.keys.tokenizer, self._source.vocab_size
        if own is not None:
            if trained is not None and (trained.tokenizer is not None or own > trained.vocab_size):
                raise ValueError(f"data.source={self.keys.source} has other tokens than the model")
            return Bare(own)
        known = tokenizer_of(self._init) if trained is None else trained.make_tokenizer().to_dict()
        if known is not None and choice in (None, "init"):
            return tokenizer_from_dict(known)
        size = None if choice is None else trained_size(choice)
        if size is None:
            tokenizer = read_tokenizer(choice or "bytes", self.keys.separator)
        else:
            plain = self._prepare(readers["train"], ByteTokenizer(), "train")
            chosen = divide(plain, fractions, multi_label=self.keys.multi_label)["train"]
            tokenizer = trained_tokenizer(plain, chosen, size, self.keys.cache)
        if known is not None and not same_tokenizer(tokenizer.to_dict(), known):
            raise ValueError(f"data.tokenizer={choice} is another tokenizer than the model was trained with")
        return tokenizer

    def _prepare(self, reader: Reader, tokenizer: Tokenizer | Bare, split: str) -> Labelled:
        """The documents of a reader as tokens, from the cache if it has them."""
        keys = self.keys
        given = getattr(keys, split)
        name = Path(os.path.abspath(given if isinstance(given, str) else keys.root or keys.source)).stem
        plan = [store.VERSION, reader.stamp, tokenizer.to_dict(), keys.model_dump(include=_PREPARED_BY)]
        folder = in_cache(name, plan, keys.cache, store.MANIFEST, lambda folder: _write(reader, tokenizer, folder))
        opened = store.open_store(folder, check=keys.check)
        manifest = json.loads((folder / store.MANIFEST).read_text(encoding="utf-8"))
        sets = [tuple(one) for one in manifest["label_sets"]]
        return Labelled(opened.splits[_DOCUMENTS], sets, folder)

    def _find_repeats(self, found: Mapping[str, Labelled], numbers: dict[str, Integers]) -> None:
        """Warn of documents that a later split has too; with `duplicates=drop` remove them from `numbers`."""
        pair = [("a", "<u8"), ("b", "<u8")]
        hashes = {
            name: np.ascontiguousarray(np.asarray(one.corpus.hashes)[numbers[name]]).view(pair).reshape(-1)
            for name, one in found.items()
        }
        names = [name for name in SPLITS if name in hashes]
        for place, name in enumerate(names[:-1], start=1):
            repeated = np.flatnonzero(np.isin(hashes[name], np.concatenate([hashes[one] for one in names[place:]])))
            if len(repeated):
                choice = self.keys.duplicates
                _warn(f"{len(repeated)} {name} documents are in a later split too (data.duplicates={choice})")
                if choice == "drop":
                    numbers[name] = np.delete(numbers[name], repeated)

    @property
    def _reading(self) -> dict[str, Any]:
        """The fields of the info that say how documents are read."""
        read = {key: getattr(self.keys, key) for key in ("max_length", "truncation", "segment", "gradient_segments")}
        return read if read["truncation"] != "none" else {**read, "max_length": None}

    def _finish(
        self, found: Mapping[str, Labelled], numbers: Mapping[str, Integers], tokenizer: Tokenizer | Bare
    ) -> None:
        """Name the classes, make the targets and the info."""
        keys, trained, prepare = self.keys, self._trained, self._source.prepare
        several = keys.multi_label
        labels = {name: np.asarray(one.corpus.labels)[numbers[name]] for name, one in found.items()}
        used = {
            name: {label for number in np.unique(labels[name]) for label in one.sets[number]}
            for name, one in found.items()
        }
        names = sort_names(used["train"]) if trained is None else trained.class_names
        if len(names) < (1 if several else 2):
            raise ValueError(f"the training documents have {len(names)} different labels, too few for a classifier")
        for name, own in used.items():
            if unknown := sorted(own.difference(names)):
                raise ValueError(f"the label {unknown[0]!r} of {name} documents is not among the classes {names}")
        for stage, name in STAGES.items():
            if name in found:
                targets = targets_of(labels[name], found[name].sets, names, multi_label=several)
                self.splits[stage] = Split(
                    found[name].corpus, numbers[name], targets, tokenizer.separator, keys.max_length, keys.truncation
                )
        sizes: dict[str, int | None] = {stage: split.documents for stage, split in self.splits.items()}
        checksums = {stage: [split.checksum()] for stage, split in self.splits.items()}
        if trained is not None:
            sizes, checksums = {**trained.sizes, **sizes}, {**trained.checksums, **checksums}
            self._info = replace(trained, **self._reading, sizes=sizes, checksums=checksums)
            return
        train = self.splits["train"]
        counts = count_classes(train.targets, len(names))
        self._info = DocumentInfo(
            class_names=names,
            multi_label=several,
            vocab_size=tokenizer.vocab_size,
            separator=tokenizer.separator,
            tokenizer=None if isinstance(tokenizer, Bare) else tokenizer.to_dict(),
            window=train.longest,
            text_column=keys.text_column,
            class_counts=counts,
            class_weights=find_weights(keys.class_weights, counts, train.documents, names, multi_label=several),
            source=keys.source,
            source_plugin=plugin_of(self._source.open) or plugin_of(prepare),
            preparation=None if prepare is None else f"{prepare.__module__}.{prepare.__qualname__}",
            sizes=sizes,
            checksums=checksums,
            tokens=int(train.whole_lengths.sum()),
            **self._reading,
        )


def _refuse_trained(keys: DocumentDataKeys, run: DocumentDataKeys, split: str) -> None:
    """ValueError if a split to measure has documents that the run was trained on."""
    same = (run.source, run.train) == (keys.source, keys.train) and same_root(run.root, keys.root)
    if not same or not isinstance(getattr(keys, split), float):
        return
    # `divide` first chooses the documents of test, then of validation from the others.
    chosen = ("test", "validation") if split == "validation" else ("test",)
    shares, own = ({key: getattr(one, key) for key in chosen} for one in (keys, run))
    refuse_larger_shares(shares, own)
    for key, usual in {"text_column": "text", "label_column": "label", "label_delimiter": None}.items():
        if (getattr(keys, key) or usual) != (getattr(run, key) or usual):
            raise ValueError(f"data.{key} divides the documents in another way than the run: give data.{split}=FILE")


# --- prepared documents: a folder of `longseq.tasks.text.store` with labels and hashes, whose manifest also has
# `label_sets`, the sets of labels that occur; left_out.txt lists the documents that cannot be read


class Bare(NamedTuple):
    """In place of a tokenizer, for documents that are tokens without a text."""

    vocab_size: int
    separator: None = None

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "bare", "vocab_size": self.vocab_size}


class Labelled(NamedTuple):
    """The prepared documents of a split, with the labels `sets[corpus.labels]`."""

    corpus: store.Corpus
    sets: list[Labels]
    folder: Path


def trained_tokenizer(prepared: Labelled, numbers: Integers, size: int, cache: str | None) -> Tokenizer:
    """A tokenizer of `size` tokens, trained on the documents `numbers` of a split of bytes, or from the cache."""
    corpus, decode = prepared.corpus, ByteTokenizer().decode
    texts = (
        decode(corpus.tokens[corpus.offsets[number] : corpus.offsets[number + 1]].tolist())
        for number in numbers.tolist()
    )
    plan = [prepared.folder.name, hashlib.sha256(numbers.tobytes()).hexdigest(), size]

    def write(folder: Path) -> None:
        write_text(folder / store.TOKENIZER, train_tokenizer(texts, size).to_dict()["json"])

    return read_tokenizer(str(in_cache("tokenizer", plan, cache, store.TOKENIZER, write)))


def _write(reader: Reader, tokenizer: Tokenizer | Bare, folder: Path) -> None:
    """Write the files of prepared documents, the manifest last."""
    writer = store.SplitWriter(folder, _DOCUMENTS, tokenizer.vocab_size, ("labels", "hashes"))
    numbers: dict[Labels, int] = {}
    left_out: list[str] = []

    def readable() -> Iterator[Document]:
        for one in reader.read():
            if isinstance(one, Malformed):
                left_out.append(one.describe())
            elif not len(one.text.strip() if isinstance(one.text, str) else one.text):
                left_out.append(f"{one.place.describe()}: an empty document")
            else:
                yield one

    for batch in batched(readable()):
        labels = np.array([numbers.setdefault(one.labels, len(numbers)) for one in batch], np.int64)
        one = _encode(batch, tokenizer)
        writer.add(one.tokens, one.lengths, one.byte_counts, labels=labels, hashes=one.hashes)
    (folder / _LEFT_OUT).write_text("".join(f"{line}\n" for line in left_out), encoding="utf-8")
    manifest = {**manifest_of(tokenizer, folder), "splits": {_DOCUMENTS: writer.close()}, "label_sets": list(numbers)}
    write_text(folder / store.MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _encode(batch: list[Document], tokenizer: Tokenizer | Bare) -> Encoded:
    if not isinstance(tokenizer, Bare):
        return encode(batch, tokenizer)
    documents = [np.asarray(one.text) for one in batch]
    digests = [hashlib.blake2b(one.astype("<i8").tobytes(), digest_size=16).digest() for one in documents]
    lengths = np.array([len(one) for one in documents], np.int64)
    hashes = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    return Encoded(np.concatenate(documents), lengths, np.zeros_like(lengths), np.zeros_like(lengths), hashes)


def divide(found: Labelled, fractions: Mapping[str, float], *, multi_label: bool) -> dict[str, Integers]:
    """The numbers of the documents of train and of the splits that `fractions` names, stratified by label.

    Of the documents of a label, the share `fractions["validation"]` goes to validation and `fractions["test"]` to test,
    at least one to each if there are enough. Hashes of the contents choose them, whatever the order of a file; equal
    documents stay together. Several labels count as the rarest. ValueError for a class with only one document.
    """
    labels, hashes, sets = np.asarray(found.corpus.labels), np.asarray(found.corpus.hashes), found.sets
    counts: Counter[str] = Counter()
    for number, count in zip(*np.unique(labels, return_counts=True), strict=True):
        counts.update(dict.fromkeys(sets[number], int(count)))
    order = {name: index for index, (name, _) in enumerate(counts.most_common())}
    # The rarest label of each document, -1 without labels.
    strata = np.array([max((order[name] for name in one), default=-1) for one in sets], np.int64)[labels]

    same = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    first, group = same[1], same[2].reshape(-1)  # of equal documents the first, and the group of each document
    split = np.zeros(len(first), np.int8)
    for stratum in np.unique(strata[first]).tolist():
        members = np.flatnonzero(strata[first] == stratum)  # in the order of the hashes, which `unique` sorts
        if len(members) == 1 and not multi_label and fractions:
            raise ValueError(f"the class {sets[labels[first[members[0]]]][0]!r} has one document, too few for a split")
        room, start = len(members) - 1, 0
        for name in ("test", "validation"):
            if name in fractions and room:
                size = min(room, max(1, round(fractions[name] * len(members))))
                split[members[start : start + size]] = SPLITS.index(name)
                start, room = start + size, room - size
    return {name: np.flatnonzero(split[group] == SPLITS.index(name)) for name in ("train", *fractions)}
