"""The data module of document classifiers: labelled documents, packed or padded to batches of a token budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

from longseq.models import read as read_model
from longseq.plugins import plugin_of
from longseq.tasks.config import read
from longseq.tasks.data.labels import count_classes, find_weights, rarest_labels, sort_names, targets_of
from longseq.tasks.data.loader import BatchLoader, TrainingLoader, find_place, follow
from longseq.tasks.data.module import TaskData, refuse_larger_shares, same_root
from longseq.tasks.document import arena as _arena  # noqa: F401  registers its sources
from longseq.tasks.document import libraries as _libraries  # noqa: F401  registers its source
from longseq.tasks.document import linear, sources
from longseq.tasks.document.batch import DocumentBatches, Split
from longseq.tasks.document.config import DocumentDataKeys
from longseq.tasks.document.info import DocumentInfo
from longseq.tasks.document.inputs import DocumentFiles
from longseq.tasks.document.prepared import (
    LEFT_OUT,
    Bare,
    Labelled,
    divide,
    find_repeats,
    prepare_documents,
    trained_tokenizer,
)
from longseq.tasks.document.sampler import DocumentSampler, EveryDocument, PackedSampler, PaddedSampler
from longseq.tasks.text.store import Integers
from longseq.tasks.text.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer, tokenizer_from_dict, trained_size
from longseq.tokenizer_files import same_tokenizer

_log = logging.getLogger(__name__)

# The split of each stage of a run.
STAGES = {"train": "train", "val": "validation", "test": "test"}

# Of a model that is saved without its run: the tokens of a batch in evaluation.
_BUDGET = 65536

_NAMED = 3  # documents that cannot be read, in messages


class DocumentData(TaskData):
    """Labelled documents for training, validation and test; batches are those of `longseq.tasks.document.batch`.

    `source` names the source of the documents. `files`: `root` is a file (jsonl, csv, tsv, parquet), a saved Hugging
    Face set, a folder of these, or a folder of text files with a folder for each class; or `train`, `validation` and
    `test` name such files below it. `text_column` and `label_column` name the columns, by default text and label.
    `libraries`: Python files of eight installed libraries. A program registers others (see
    `longseq.tasks.document.sources`), which read `options`.

    `validation` and `test` are files, or the shares of the training documents that are set apart, stratified by label
    (see `longseq.tasks.document.prepared.divide`). A warning counts the documents that are in two splits; with
    `duplicates=drop` training and validation leave out what test has, and training what validation has. A document has
    one label, or with `multi_label` any number (see `longseq.tasks.data.labels.read_labels`). What cannot be read is
    left out and listed, or with `on_bad_line=stop` an error. `class_weights=balanced` weights the classes in the loss,
    each by documents / (classes * documents of the class), or with `multi_label` by documents without / with the label.
    `sampling=balanced` draws each class equally often instead, of several labels each document by its rarest one.

    `tokenizer` is bytes, a tokenizer.json or its folder, `train:SIZE` (trained on the training documents), or `init`
    (that of the checkpoint that `init` gives, which is the default beside `init`; else bytes). Tokens are kept in
    `cache` (see `longseq.tasks.text.corpora.in_cache`), and compared with their checksums with `check`. Of
    documents of more than `max_length` tokens `truncation` states which ones are read (see
    `longseq.tasks.document.batch`). With `random_crops` training reads `max_length` tokens from a place that is
    drawn for each document and epoch.

    `packing` puts the documents of a batch end to end (`packed`) or pads documents of similar lengths (`padded`; see
    `longseq.tasks.document.sampler`). `batch_size` and `eval_batch_size` count tokens. Which documents make a batch is
    a function of (`seed`, epoch, place in the epoch).
    """

    info_class = DocumentInfo
    inputs = DocumentFiles

    def __init__(
        self,
        keys: DocumentDataKeys,
        *,
        batch_size: int,
        seed: int = 0,
        init: str | None = None,
        stages: Collection[str] = tuple(STAGES),
        trained: DocumentInfo | None = None,
    ) -> None:
        """`init` is the checkpoint with the initial weights. `stages` are those that are run: the documents of others
        are not opened. `trained` is the info of a trained model, whose tokenizer and classes are taken.
        """
        super().__init__()
        self.keys = keys = read(DocumentDataKeys, vars(keys), "data")
        self.batch_size, self.eval_batch_size = batch_size, keys.eval_batch_size or batch_size
        self.seed, self.stages = seed, tuple(stages)
        self._init, self._trained = init, trained
        self._source = sources.find(keys)
        self._splits: dict[str, Split] = {}
        self._counts: dict[tuple[int, ...], tuple[int, int]] = {}  # see `_count_epoch`
        self._info: DocumentInfo | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> DocumentData:
        """The data of a configuration; `batch_size` counts tokens."""
        keys = read(DocumentDataKeys, config["data"], "data")
        datamodule = cls(keys, batch_size=batch_size, seed=config["seed"], init=config.get("init"))
        datamodule.setup()
        if config["model"]["name"] == linear.MODEL:
            # The fit reads the documents by itself; a batch only has to hold each of them.
            datamodule.keys = datamodule.keys.model_copy(update={"packing": "padded", "sampling": None})
            datamodule.batch_size = max(batch_size, datamodule.split("train").longest)
        return datamodule

    @classmethod
    def for_evaluation(
        cls,
        config: Mapping[str, Any],
        changes: Mapping[str, Any],
        *,
        split: str,
        trained: DocumentInfo,
        batch_size: int,
    ) -> DocumentData:
        own = config.get("data") or {
            "name": "given",
            "source": "files",
            "multi_label": trained.multi_label,
            "text_column": trained.text_column,
            "max_length": trained.max_length,
            "truncation": trained.truncation,
            "segment": trained.segment,
        }
        # The tokenizer is that of the model: the file of the training may be elsewhere by now.
        own = {**own, "tokenizer": None, "separator": None, "sampling": None, "random_crops": False}
        if changes.get("truncation") == "none":
            own = {**own, "max_length": None}
        keys = read(DocumentDataKeys, {**own, **_found_here(changes, own.get("root"))}, "data")
        if keys.multi_label != trained.multi_label:
            raise ValueError(f"the model was trained with data.multi_label={trained.multi_label}")
        if config.get("data"):
            _refuse_trained(keys, read(DocumentDataKeys, config["data"], "data"), STAGES[split])
        budget = (config.get("recipe") or {}).get("batch_size") or _BUDGET
        # What validation leaves out depends on test.
        stages = ("val", "test") if split == "val" and keys.duplicates == "drop" else (split,)
        datamodule = cls(keys, batch_size=budget, seed=config.get("seed", 0), stages=stages, trained=trained)
        datamodule.setup()
        return datamodule

    @property
    def info(self) -> DocumentInfo:
        """What models and checkpoints need to know of the documents; available after `setup`."""
        assert self._info is not None, "call setup() first"
        return self._info

    @property
    def registered_parts(self) -> list[Any]:
        return [self._source.open] if plugin_of(self._source.open) else []

    @property
    def batches_per_epoch(self) -> int:
        """The number of training batches of one device in an epoch."""
        return self._count_epoch()[0]

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the training documents that an epoch reads, after truncation."""
        return self._count_epoch()[1]

    def _count_epoch(self) -> tuple[int, int]:
        """The batches and tokens of an epoch, which packs all documents: they are counted once."""
        place = (self.batch_size, *find_place(self.trainer))
        if place not in self._counts:
            sampler = self._training_sampler()
            self._counts[place] = len(sampler), sampler.tokens_per_epoch
        return self._counts[place]

    def split(self, stage: str) -> Split:
        """The documents of train, val or test; available after `setup`."""
        return self._splits[stage]

    def setup(self, stage: str | None = None) -> None:
        """Opens the documents, prepares their tokens where the cache has none; a second call does nothing."""
        if self._splits:
            return
        opened = self._source.open(self.keys)
        own = {name: find for name, find in opened.splits.items() if name == "train" or name in self._wanted()}
        divided = [name for name in self._wanted() if name not in own and name != "train"]
        fractions = self._fractions(opened.splits)
        if not divided and "train" not in self._wanted():
            del own["train"]
        readers = {name: find() for name, find in own.items()}
        tokenizer = self._choose_tokenizer(opened, readers, fractions)
        found = {name: self._prepare(reader, tokenizer, name) for name, reader in readers.items()}
        numbers = {name: np.arange(one.corpus.documents) for name, one in found.items()}
        if "train" in found and fractions:
            numbers |= self._divide(found["train"], fractions)
            found |= {name: found["train"] for name in fractions}
        found = {name: one for name, one in found.items() if name in self._wanted()}
        self._report_left_out(found)
        numbers = self._without_repeats(found, {name: numbers[name] for name in found})
        for name, chosen in numbers.items():
            if not len(chosen):
                raise ValueError(f"the {name} split has no document")
        self._finish(found, numbers, tokenizer)

    def train_dataloader(self) -> TrainingLoader:
        sampler = self._training_sampler()
        return TrainingLoader(
            DocumentBatches(  # type: ignore[arg-type]
                self._splits["train"],
                self.batch_size,
                sampler.longest,
                crops=self.seed if self.keys.random_crops else None,
            ),
            sampler,
            num_workers=self.keys.num_workers,
            pin_memory=self.keys.pin_memory and torch.cuda.is_available(),
            **follow(self.trainer),
        )

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, stage: str) -> BatchLoader:
        rank, world_size, _ = find_place(self.trainer)
        every = self._every(stage, rank=rank, world_size=world_size)
        return BatchLoader(
            DocumentBatches(self._splits[stage], every.budget, every.longest),  # type: ignore[arg-type]
            every,  # type: ignore[arg-type]
            num_workers=self.keys.num_workers,
            pin_memory=self.keys.pin_memory and torch.cuda.is_available(),
        )

    def _every(self, stage: str, **place: int) -> EveryDocument:
        lengths = self._splits[stage].lengths
        # Where nobody has chosen a budget, the longest document of the split may be longer than a training batch.
        budget = self.keys.eval_batch_size or max(self.batch_size, int(lengths.max()))
        return EveryDocument(lengths, budget, packed=self.keys.packing == "packed", **place)

    def _training_sampler(self) -> DocumentSampler:
        return self._sample(**find_place(self.trainer)._asdict())

    def _sample(self, **place: int) -> DocumentSampler:
        train = self._splits["train"]
        if self.keys.packing == "padded":
            return PaddedSampler(train.lengths, self.batch_size, seed=self.seed, **place)
        classes = None if self.keys.sampling is None else rarest_labels(train.targets)
        return PackedSampler(train.lengths, self.batch_size, classes=classes, seed=self.seed, **place)

    def _wanted(self) -> list[str]:
        return [STAGES[stage] for stage in self.stages]

    def _fractions(self, given: Collection[str]) -> dict[str, float]:
        """The shares of training documents that are set apart for splits that the source does not have."""
        found = {}
        for name in ("validation", "test"):
            value = getattr(self.keys, name)
            if name in given or (value is None and name not in self._wanted()):
                continue
            if not isinstance(value, float):
                raise ValueError(f"data.{name}={value}: give a file, or the share of the training documents")
            found[name] = value
        return found

    def _choose_tokenizer(
        self, opened: sources.Opened, readers: Mapping[str, sources.Reader], fractions: Mapping[str, float]
    ) -> Tokenizer | Bare:
        trained, choice = self._trained, self.keys.tokenizer
        if opened.vocab_size is not None:
            if trained is not None and (trained.tokenizer is not None or opened.vocab_size > trained.vocab_size):
                raise ValueError(f"the tokens of data.source={self.keys.source} are not those of the model")
            return Bare(opened.vocab_size)
        known = self._initial_tokenizer() if trained is None else trained.make_tokenizer().to_dict()
        if known is not None and choice in (None, "init"):
            return tokenizer_from_dict(known)
        if choice == "init":
            raise ValueError("data.tokenizer=init needs init=FILE, a model that reads text")
        size = None if choice is None else trained_size(choice)
        if size is None:
            tokenizer = read_tokenizer(choice or "bytes", self.keys.separator)
        else:
            plain = self._prepare(readers["train"], ByteTokenizer(), "train")
            numbers = self._divide(plain, fractions)["train"] if fractions else np.arange(plain.corpus.documents)
            tokenizer = trained_tokenizer(plain, numbers, size, self.keys.cache)
        if known is not None and not same_tokenizer(tokenizer.to_dict(), known):
            raise ValueError(f"data.tokenizer={choice} is another tokenizer than the model was trained with")
        return tokenizer

    def _initial_tokenizer(self) -> Mapping[str, Any] | None:
        """The tokenizer of the checkpoint with the initial weights; None without one that reads text."""
        if self._init is None:
            return None
        saved = read_model(self._init, label=f"init={self._init}")
        data = (saved.run.get("hyper_parameters") or {}).get("data") or {}
        return data.get("tokenizer") or (saved.text or {}).get("tokenizer")

    def _prepare(self, reader: sources.Reader, tokenizer: Tokenizer | Bare, split: str) -> Labelled:
        keys = self.keys
        given = getattr(keys, split, None)
        name = Path(os.path.abspath(given if isinstance(given, str) else keys.root or keys.source)).stem
        reading = {
            "source": keys.source,
            "columns": [keys.text_column, keys.label_column, keys.label_delimiter, keys.multi_label],
            "options": dict(keys.options),
        }
        return prepare_documents(name, reader, tokenizer, reading=reading, cache=keys.cache, check=keys.check)

    def _report_left_out(self, found: Mapping[str, Labelled]) -> None:
        """Warn of documents that cannot be read; with `on_bad_line=stop` they are a ValueError."""
        for folder, count in {one.folder: one.left_out for one in found.values() if one.left_out}.items():
            path = folder / LEFT_OUT
            first = "; ".join(path.read_text(encoding="utf-8").splitlines()[:_NAMED])
            message = f"{count} documents cannot be read and are left out ({path}): {first}"
            if self.keys.on_bad_line == "stop":
                raise ValueError(message)
            _warn(message)

    def _divide(self, found: Labelled, fractions: Mapping[str, float]) -> dict[str, Integers]:
        corpus = found.corpus
        assert corpus.labels is not None
        assert corpus.hashes is not None
        numbers = divide(corpus.labels, found.sets, corpus.hashes, fractions, multi_label=self.keys.multi_label)
        return {name: chosen for name, chosen in numbers.items() if name == "train" or name in fractions}

    def _without_repeats(self, found: Mapping[str, Labelled], numbers: dict[str, Integers]) -> dict[str, Integers]:
        """Warn of documents that two splits have; with `duplicates=drop` leave them out."""
        hashes = {name: np.asarray(one.corpus.hashes)[numbers[name]] for name, one in found.items()}
        for name, repeated in find_repeats(hashes).items():
            _warn(f"{len(repeated)} {name} documents are in a later split too (data.duplicates={self.keys.duplicates})")
            if self.keys.duplicates == "drop":
                numbers[name] = np.delete(numbers[name], repeated)
        return numbers

    def _finish(
        self, found: Mapping[str, Labelled], numbers: Mapping[str, Integers], tokenizer: Tokenizer | Bare
    ) -> None:
        """Name the classes, make the targets and the info."""
        keys, trained = self.keys, self._trained
        labels = {name: np.asarray(one.corpus.labels)[numbers[name]] for name, one in found.items()}
        sets = {name: {label for number in np.unique(labels[name]) for label in one.sets[number]}
                for name, one in found.items()}  # fmt: skip
        names = sort_names(sets["train"]) if trained is None else trained.class_names
        if len(names) < (1 if keys.multi_label else 2):
            raise ValueError(f"the training documents have {len(names)} different labels, too few for a classifier")
        for name, used in sets.items():
            if unknown := sorted(used.difference(names)):
                raise ValueError(f"the label {unknown[0]!r} of {name} documents is none of the classes {names}")
        separator = None if isinstance(tokenizer, Bare) else tokenizer.separator
        for stage, name in STAGES.items():
            if name in found:
                targets = targets_of(labels[name], found[name].sets, names, multi_label=keys.multi_label)
                self._splits[stage] = Split(
                    found[name].corpus, numbers[name], targets, separator, keys.max_length, keys.truncation
                )
        sizes: dict[str, int | None] = {stage: split.documents for stage, split in self._splits.items()}
        checksums = {stage: [split.checksum()] for stage, split in self._splits.items()}
        if trained is None:
            self._info = self._describe(names, tokenizer, sizes, checksums)
            return
        self._info = replace(
            trained,
            max_length=keys.max_length,
            truncation=keys.truncation,
            segment=keys.segment,
            gradient_segments=keys.gradient_segments,
            sizes={**trained.sizes, **sizes},
            checksums={**trained.checksums, **checksums},
        )

    def _describe(
        self,
        names: list[str],
        tokenizer: Tokenizer | Bare,
        sizes: dict[str, int | None],
        checksums: dict[str, list[int]],
    ) -> DocumentInfo:
        """The info of the training documents."""
        keys, own, prepare = self.keys, self._splits["train"], self._source.prepare
        counts = count_classes(own.targets, len(names))
        return DocumentInfo(
            class_names=names,
            multi_label=keys.multi_label,
            vocab_size=tokenizer.vocab_size,
            separator=own.separator,
            tokenizer=None if isinstance(tokenizer, Bare) else tokenizer.to_dict(),
            window=own.longest,
            max_length=keys.max_length,
            truncation=keys.truncation,
            segment=keys.segment,
            gradient_segments=keys.gradient_segments,
            text_column=keys.text_column,
            class_counts=counts,
            source=keys.source,
            source_plugin=plugin_of(self._source.open) or plugin_of(prepare),
            preparation=None if prepare is None else sources.describe_preparation(keys.source, prepare),
            class_weights=find_weights(keys.class_weights, counts, own.documents, names, multi_label=keys.multi_label),
            sizes=sizes,
            checksums=checksums,
        )


def _refuse_trained(keys: DocumentDataKeys, run: DocumentDataKeys, split: str) -> None:
    """ValueError where a split of the documents of a run would have some that it was trained on."""
    same = (run.source, run.train) == (keys.source, keys.train) and same_root(run.root, keys.root)
    if not same or not isinstance(getattr(keys, split), float):
        return
    # Those for the test are chosen first, and those for validation from the others.
    chosen = ("test", "validation") if split == "validation" else ("test",)
    shares, own = ({key: getattr(one, key) for key in chosen} for one in (keys, run))
    refuse_larger_shares(shares, own)
    for key, usual in {"text_column": "text", "label_column": "label", "label_delimiter": None}.items():
        if (getattr(keys, key) or usual) != (getattr(run, key) or usual):
            raise ValueError(f"data.{key} divides the documents in another way than the run: give data.{split}=FILE")


def _found_here(changes: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """`changes` to the data of a training with `root`: files for a split that lie in the working folder are those."""
    found = dict(changes)
    for split in ("validation", "test"):
        given = changes.get(split)
        if isinstance(given, str) and "root" not in changes and os.path.exists(given):
            found[split] = os.path.abspath(given)
    return found


@rank_zero_only
def _warn(message: str) -> None:
    _log.warning(message)
