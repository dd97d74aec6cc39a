"""The data module of language models: windows of prepared tokens, of one corpus or of several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longseq.tasks.data.loader import BatchLoader, TrainingLoader
from longseq.tasks.data.module import TaskData
from longseq.tasks.data.place import Place, find_place, follow
from longseq.tasks.data.sampler import UpdateSampler
from longseq.tasks.data.shares import refuse_larger_shares, same_root
from longseq.tasks.text.corpora import fractions_of, open_corpora
from longseq.tasks.text.info import TextInfo
from longseq.tasks.text.keys import READ_BY, TextDataKeys
from longseq.tasks.text.sampler import EveryStream, EveryWindow, MixedSampler, StreamSampler, WindowBatches
from longseq.tasks.text.store import Corpus, TokenStore
from longseq.tasks.text.windows import Assembler, Concatenated, Documents, Windows, most_sequences
from longseq.tasks.training.checkpoint import WINDOW
from longseq.tasks.training.options import read
from longseq.tokenizer_files import find_start, same_tokenizer

_log = logging.getLogger(__name__)

# The name of each split as a stage of a run.
STAGES = {"train": "train", "val": "validation", "test": "test"}


class LanguageModelData(TaskData):
    """Windows of `window` tokens for training, validation and test; batches are those of `longseq.tasks.text.batch`.

    `source` names the source of the tokens. `tokens`: the folder of `longseq prepare` at `root`, whose checksums are
    compared with `check`. `files`: the text at `root`, which has `column`, `prompt_column`, `tokenizer` and `separator`
    as `longseq prepare` has them. `standard_library`: the bytes of Python's own modules. `python_sources`: those and
    the modules of all installed packages. `validation` and `test` are the parts of the documents that are set apart
    (see `longseq.tasks.text.documents.split_numbers`). Text of `files` and `python_sources` is prepared once and kept
    in `cache`, by default `longseq.tasks.text.corpora.cache_folder`. Several entries of `root` are mixed by `weights`;
    by default each is read once an epoch.

    `packing` is the way to make windows: `concatenated` puts documents end to end and cuts them; `documents` packs
    whole documents by best fit and cuts only those that are longer than a window; `streams` carries the state
    from window to window (truncated backpropagation through time). The state is reset where a document begins; without
    `reset_state` it is not, and windows are rows of their own.

    Which windows make a batch is a function of (`seed`, epoch, place in the epoch). ValueError for what the user can
    mend.
    """

    info_class = TextInfo

    def __init__(self, keys: TextDataKeys, *, batch_size: int, seed: int = 0) -> None:
        super().__init__()
        self.keys = keys = read(TextDataKeys, vars(keys), "data")
        self.batch_size, self.eval_batch_size = batch_size, keys.eval_batch_size or batch_size
        self.seed = seed
        # The streams of all devices in which a split is measured, unless a key gives those of each: a run is measured
        # again in those of its training, for each stream begins without a state.
        self._streams: int | None = None
        # The token with which documents begin for the model that is measured; None: the separator, as in training.
        self._start: int | None = None
        self._stages: tuple[str, ...] = tuple(STAGES)  # the stages that are run: their splits must not be empty
        self._stores: list[TokenStore] = []
        self._windows: dict[str, list[Windows]] = {}
        self._info: TextInfo | None = None
        self._told: set[str] = set()  # the stages of which a warning has told that they have few windows

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> LanguageModelData:
        """The data of a configuration; `batch_size` counts tokens."""
        keys = read(TextDataKeys, config["data"], "data")
        window = keys.window
        if batch_size % window:
            parts = config["recipe"]["batch_size"] // batch_size
            nearest = max(1, round(batch_size / window)) * window * parts
            raise ValueError(
                f"recipe.batch_size={config['recipe']['batch_size']} counts tokens and gives a device {batch_size} at "
                f"a time, which are no whole windows of data.window={window}: set recipe.batch_size={nearest}"
            )
        datamodule = cls(keys, batch_size=batch_size // window, seed=config["seed"])
        datamodule.setup()
        effective = config["recipe"]["batch_size"]
        count = sum(windows.count for windows in datamodule._windows["train"])
        if count < effective // window:
            raise ValueError(
                f"the training split has {count} windows of {window} tokens, and an update needs "
                f"{effective // window} (recipe.batch_size={effective}): give more text, a smaller "
                "recipe.batch_size, or a smaller data.window"
            )
        return datamodule

    @classmethod
    def for_evaluation(
        cls,
        config: Mapping[str, Any],
        changes: Mapping[str, Any],
        *,
        split: str,
        trained: TextInfo,
        batch_size: int,
    ) -> LanguageModelData:
        if not config.get("data") and changes.get("source") is None:
            raise ValueError(
                "a saved model does not tell what to measure it on: give data.source=files data.root=TEXT, or "
                "data.source=tokens data.root=FOLDER"
            )
        own = config.get("data") or {"name": "given", "window": trained.window}
        if changes.get("source", own.get("source")) != own.get("source"):
            own = {key: None if key in READ_BY else value for key, value in own.items()}
        # The weights mix the windows of training alone, and another root may have another number of entries.
        keys = read(TextDataKeys, {**own, "weights": None, **changes}, "data")
        run = read(TextDataKeys, config["data"], "data") if config.get("data") else None
        if run is not None and run.source == keys.source and same_root(run.root, keys.root):
            name = STAGES[split]
            share, own_share = ({name: fractions_of(one)[name]} for one in (keys, run))
            refuse_larger_shares(share, own_share, "give other text by data.root")
        # By default as many tokens as the windows of the training held. A model without a run may state how much it can
        # read, which may be too much for a batch of several.
        longest = trained.window if run is not None or keys.packing == "streams" else min(trained.window, WINDOW)
        rows = max(1, batch_size * longest // keys.window)
        datamodule = cls(keys, batch_size=rows, seed=config.get("seed", 0))
        datamodule._stages = (split,)
        if keys.packing == "streams" and (own.get("packing"), own.get("window")) == (keys.packing, keys.window):
            datamodule._streams = ((config.get("recipe") or {}).get("batch_size") or 0) // keys.window or None
        datamodule.setup()
        if not same_tokenizer(datamodule.info.tokenizer, trained.tokenizer):
            raise ValueError(_another_tokenizer(keys, trained))
        datamodule._check_tokens(STAGES[split], trained.vocab_size)
        datamodule._start = find_start(trained.tokenizer)
        return datamodule

    @property
    def info(self) -> TextInfo:
        """The properties of the text for models and checkpoints; available after `setup`."""
        assert self._info is not None, "call setup() first"
        return self._info

    @property
    def batches_per_epoch(self) -> int:
        """The number of training batches of one device in an epoch."""
        return len(self._training_sampler())

    @property
    def tokens_per_epoch(self) -> int:
        sampler = self._training_sampler()
        return sampler.updates * sampler.effective_batch_size * self.keys.window

    def setup(self, stage: str | None = None) -> None:
        """Opens the corpora; a second call does nothing."""
        if self._stores:
            return
        self._stores = open_corpora(self.keys)
        first = self._stores[0]
        for other in self._stores[1:]:
            if not same_tokenizer(other.tokenizer, first.tokenizer):
                raise ValueError(f"data.root: {first.name} and {other.name} were prepared with different tokenizers")
        _warn_of_fractions(self._stores)
        for stage, split in STAGES.items():
            corpora = [store.splits[split] for store in self._stores]
            self._windows[stage] = [self._cut(corpus, whole=stage == "train") for corpus in corpora]
            if stage in self._stages and not sum(len(corpus.tokens) for corpus in corpora):
                raise ValueError(f"the {split} split of the text is empty: {self._remedy(split)}")
        if "train" in self._stages and (empty := [s.name for s in self._stores if not len(s.splits["train"].tokens)]):
            raise ValueError(f"{empty[0]} holds no text to train on: {self._remedy('train')}")
        if "train" in self._stages and self.keys.packing != "streams":
            _warn_of_prompts([store.splits["train"] for store in self._stores], self.keys.window)
        ratios = [store.gzip_bits_per_byte for store in self._stores]
        self._info = TextInfo(
            vocab_size=first.vocab_size,
            separator=first.separator,
            window=self.keys.window,
            tokenizer=first.tokenizer,
            sizes={stage: sum(windows.count for windows in cut) for stage, cut in self._windows.items()},
            text_bytes={
                stage: sum(int(store.splits[STAGES[stage]].byte_counts.sum()) for store in self._stores)
                for stage in ("val", "test")
            },
            checksums={stage: [store.checksum(split) for store in self._stores] for stage, split in STAGES.items()},
            gzip_bits_per_byte=ratios[0] if len(ratios) == 1 else None,
        )

    def _remedy(self, split: str) -> str:
        """What to do about a split without text."""
        if self.keys.source != "tokens" and not getattr(self.keys, split, True):
            return f"data.{split}=0 leaves it no document"
        count = sum(len(corpus.byte_counts) for store in self._stores for corpus in store.splits.values())
        told = f"each document goes into one split as a whole, and there {'is' if count == 1 else 'are'} {count}: "
        if self.keys.source == "tokens":
            part = "" if split == "train" else f", or a larger part with {split}=FRACTION"
            return f"{told}prepare more documents{part}"
        return f"{told}give more, such as the lines of a .jsonl, or change data.validation and data.test"

    def train_dataloader(self) -> TrainingLoader:
        sampler = self._training_sampler()  # raises for text that is too short for a batch
        if isinstance(sampler, MixedSampler):
            for store, share in zip(self._stores, sampler.shares, strict=True):
                if not share:
                    _log.warning(
                        "no window of %s is trained on: of the %d windows of %d tokens in an epoch, its share is none",
                        store.name,
                        sampler.num_samples,
                        self.keys.window,
                    )
        return TrainingLoader(
            self._batches("train", self.batch_size),  # type: ignore[arg-type]
            sampler,
            num_workers=self.keys.num_workers,
            pin_memory=self.keys.pin_memory and torch.cuda.is_available(),
            **follow(self.trainer),
        )

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def _check_tokens(self, split: str, known: int) -> None:
        """Raise ValueError where a split has tokens that a model of `known` tokens does not know.

        A tokenizer may have more tokens than the model beside it, if no text has them.
        """
        if self.info.vocab_size <= known:
            return
        highest = max(int(store.splits[split].tokens.max(initial=0)) for store in self._stores)
        if highest >= known:
            raise ValueError(
                f"the text has the token {highest}, and the model knows {known}: the tokenizer is not that of the model"
            )

    def _cut(self, corpus: Corpus, *, whole: bool) -> Windows:
        if self.keys.packing == "documents":
            return Documents(corpus, self.keys.window)
        return Concatenated(corpus, self.keys.window, whole=whole)

    def _count_streams(self, stage: str, count: int, place: Place) -> int:
        """The streams that a process reads of a split of `count` windows: no more than it has windows."""
        own = self._streams if self.keys.eval_batch_size is None else None
        asked = own or self.eval_batch_size * place.world_size
        if asked > count and place.rank == 0 and stage not in self._told:
            self._told.add(stage)
            _log.warning(
                "the %s split has %d windows, fewer than the %d streams of %s: each window is a stream of its own and "
                "continues no other; data.eval_batch_size=1 carries the state through all of them",
                STAGES[stage],
                count,
                asked,
                "a training batch"
                if self.keys.eval_batch_size is None
                else f"data.eval_batch_size={self.eval_batch_size}",
            )
        return -(-min(asked, count) // place.world_size)

    def _batches(self, stage: str, rows: int) -> WindowBatches:
        cut = self._windows[stage]
        assemble = Assembler(
            [windows.corpus for windows in cut],
            self.keys.window,
            rows,
            sequences=most_sequences(cut, rows),
            separator=self.info.separator,
            start=self._start,
            reset_state=self.keys.reset_state,
            carries=self.keys.packing == "streams",
        )
        return WindowBatches(cut, assemble)

    def _evaluation_loader(self, stage: str) -> BatchLoader:
        found = find_place(self.trainer)
        counts = [windows.count for windows in self._windows[stage]]
        place = {"rank": found.rank, "world_size": found.world_size}
        rows = self.eval_batch_size
        every: EveryStream | EveryWindow
        if self.keys.packing == "streams":
            rows = self._count_streams(stage, counts[0], found)
            every = EveryStream(counts[0], rows, **place)
        else:
            every = EveryWindow(counts, rows, **place)
        return BatchLoader(
            self._batches(stage, rows),  # type: ignore[arg-type]
            every,  # type: ignore[arg-type]
            num_workers=self.keys.num_workers,
            pin_memory=self.keys.pin_memory and torch.cuda.is_available(),
        )

    def _training_sampler(self) -> UpdateSampler[Any]:
        place, cut = find_place(self.trainer)._asdict(), self._windows["train"]
        if self.keys.packing == "streams":
            return StreamSampler(cut[0], self.batch_size, seed=self.seed, **place)
        return MixedSampler(cut, self.batch_size, weights=self.keys.weights, seed=self.seed, **place)


def _warn_of_prompts(corpora: Sequence[Corpus], window: int) -> None:
    """Warn of answers that no window holds together with the beginning of their prompts."""
    prompts = [corpus.prompts for corpus in corpora if corpus.prompts is not None]
    cut = sum(int((lengths >= window).sum()) for lengths in prompts)
    if cut:
        _log.warning(
            "%d of %d training documents have a prompt that fills data.window=%d: their answers are learnt behind its "
            "end alone, and windows of a prompt teach nothing; give a longer window",
            cut,
            sum(len(corpus.byte_counts) for corpus in corpora),
            window,
        )


def _another_tokenizer(keys: TextDataKeys, trained: TextInfo) -> str:
    """That the text is read with another tokenizer than that of the model, and which key gives the right one."""
    if keys.source not in READ_BY["tokenizer"]:
        return "the data was prepared with another tokenizer than the model was trained with: prepare it with that one"
    told = f"data.tokenizer={keys.tokenizer or 'bytes'} is another tokenizer than the model was trained with"
    if trained.tokenizer["kind"] == "bytes":
        return f"{told}: give data.tokenizer=bytes"
    return f"{told}: give data.tokenizer=FOLDER, one with its tokenizer.json, such as the folder model of its run"


def _warn_of_fractions(stores: Sequence[TokenStore]) -> None:
    """Warn of corpora that were divided differently: one may train on a document that is measured in another."""
    told = [(store.name, store.fractions) for store in stores if store.fractions is not None]
    for name, fractions in told[1:]:
        if fractions != told[0][1]:
            parts = [" ".join(f"{split}={share}" for split, share in each.items()) for each in (told[0][1], fractions)]
            _log.warning(
                "%s was prepared with %s and %s with %s: a document that is in both may be trained on and measured; "
                "prepare them with the same fractions",
                told[0][0],
                parts[0],
                name,
                parts[1],
            )
            return
