"""The data module of language models: windows of prepared tokens, of one corpus or of several."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longseq.tasks.config import read
from longseq.tasks.data.info import STAGES
from longseq.tasks.data.loader import BatchLoader, TrainingLoader, find_place
from longseq.tasks.data.module import TaskData, refuse_larger_shares, same_root
from longseq.tasks.lm.config import READS, TextDataKeys
from longseq.tasks.text.prepare import describe, plan_of, prepare, tokenizer_of
from longseq.tasks.text.sources import STREAM, TEXT, Columns, Part, find_parts, group_files, standard_library_files
from longseq.tasks.text.store import MANIFEST, TokenStore, in_cache, open_store
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.text.windows import (
    Concatenated,
    Documents,
    EveryStream,
    EveryWindow,
    MixedSampler,
    StreamSampler,
    WindowBatches,
    Windows,
)
from longseq.tasks.training.checkpoint import WINDOW
from longseq.tokenizer_files import find_start, same_tokenizer

_log = logging.getLogger(__name__)

_FRACTION = 0.05  # the default share of validation and of test


class LanguageModelData(TaskData):
    """Windows of `window` tokens for training, validation and test, in batches of `longseq.tasks.text.windows`.

    `source` is `tokens` (folders of `longseq prepare`), `files` (text, read as by `longseq prepare`), or
    `standard_library` (Python's own modules). Text is prepared once and kept in `cache`; `validation` and `test` are
    shares of its documents (see `split_numbers`). An epoch mixes several roots by `weights`, or reads each once.

    `packing=concatenated` cuts documents that are put end to end; `documents` packs whole documents by best fit and
    cuts only those that are longer than a window; `streams` carries the state from window to window (truncated
    backpropagation through time). With `reset_state=false` a window's state is not reset where a document begins.

    The windows of a batch are a function of (`seed`, epoch, place in the epoch).
    """

    keys_class, info_class = TextDataKeys, TextInfo

    def __init__(self, keys: TextDataKeys, *, batch_size: int, seed: int = 0) -> None:
        super().__init__(keys, batch_size=batch_size, seed=seed)
        # Streams of an evaluation over all devices: as many as in training, since each begins without a state.
        self._streams: int | None = None
        self._start: int | None = None  # the token that begins a document; None: the separator, as in training
        self._tokenizer: Mapping[str, Any] | None = None  # of files, by default
        self._stages: tuple[str, ...] = tuple(STAGES)  # their splits must not be empty
        self._stores: list[TokenStore] = []
        self._windows: dict[str, list[Windows]] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], batch_size: int) -> LanguageModelData:
        """The data of a configuration; `batch_size` counts tokens."""
        keys = read(TextDataKeys, config["data"], "data")
        if batch_size % keys.window:
            raise ValueError(f"a device's batch of {batch_size} tokens has no whole windows of {keys.window}")
        datamodule = cls(keys, batch_size=batch_size // keys.window, seed=config["seed"])
        if keys.source == "files" and keys.tokenizer is None:
            datamodule._tokenizer = tokenizer_of(config.get("init"))
        datamodule.setup()
        return datamodule

    @classmethod
    def for_evaluation(
        cls, config: Mapping[str, Any], changes: Mapping[str, Any], *, split: str, trained: TextInfo, batch_size: int
    ) -> LanguageModelData:
        own = config.get("data") or {"name": "given", "window": trained.window}
        if changes.get("source", own.get("source")) != own.get("source"):
            own = {key: None if key in READS["files"] else value for key, value in own.items()}
        # Weights are for training, and another root may have another number of entries.
        keys = read(TextDataKeys, {**own, "weights": None, **changes}, "data")
        run = read(TextDataKeys, config["data"], "data") if config.get("data") else None
        if run is not None and run.source == keys.source and same_root(run.root, keys.root):
            refuse_larger_shares({STAGES[split]: fractions_of(keys)[STAGES[split]]}, fractions_of(run))
        # As many tokens at a time as in training. A model without a run may be able to read very long windows.
        longest = trained.window if run is not None or keys.packing == "streams" else min(trained.window, WINDOW)
        rows = max(1, batch_size * longest // keys.window)
        datamodule = cls(keys, batch_size=rows, seed=config.get("seed", 0))
        datamodule._stages, datamodule._tokenizer = (split,), trained.tokenizer
        if keys.packing == "streams" and (own.get("packing"), own.get("window")) == (keys.packing, keys.window):
            datamodule._streams = ((config.get("recipe") or {}).get("batch_size") or 0) // keys.window or None
        datamodule.setup()
        if not same_tokenizer(datamodule.info.tokenizer, trained.tokenizer):
            raise ValueError("the data has another tokenizer than the model was trained with")
        datamodule._start = find_start(trained.tokenizer)
        return datamodule

    @property
    def tokens_per_epoch(self) -> int:
        sampler = self.training_sampler()
        return sampler.updates * sampler.effective_batch_size * self.keys.window

    def setup(self, stage: str | None = None) -> None:
        if self._stores:
            return
        self._stores = open_corpora(self.keys, self._tokenizer)
        first = self._stores[0]
        if not all(same_tokenizer(other.tokenizer, first.tokenizer) for other in self._stores):
            raise ValueError("the folders of data.root were prepared with different tokenizers")
        for stage, split in STAGES.items():
            cut: list[Windows] = [
                Documents(store.splits[split], self.keys.window)
                if self.keys.packing == "documents"
                else Concatenated(store.splits[split], self.keys.window, whole=stage == "train")
                for store in self._stores
            ]
            self._windows[stage] = cut
            if stage in self._stages and not sum(windows.size for windows in cut):
                raise ValueError(f"the {split} split of the text is empty")
        self._info = TextInfo(
            vocab_size=first.vocab_size,
            separator=first.separator,
            window=self.keys.window,
            tokenizer=first.tokenizer,
            sizes={stage: sum(windows.count for windows in cut) for stage, cut in self._windows.items()},
            checksums={stage: [store.checksums[split] for store in self._stores] for stage, split in STAGES.items()},
        )

    def train_dataloader(self) -> TrainingLoader:
        return self.training_loader(self._batches("train", self.batch_size), self.training_sampler())

    def _batches(self, stage: str, rows: int) -> WindowBatches:
        options: dict[str, Any] = {"separator": self.info.separator, "start": self._start}
        carries, resets = self.keys.packing == "streams", self.keys.reset_state
        return WindowBatches(self._windows[stage], rows, reset_state=resets, carries=carries, **options)

    def evaluation_loader(self, stage: str) -> BatchLoader:
        rank, world_size, _ = find_place(self.trainer)
        counts, rows = [windows.count for windows in self._windows[stage]], self.eval_batch_size
        every: EveryWindow | EveryStream = EveryWindow(counts, rows, rank=rank, world_size=world_size)
        if self.keys.packing == "streams":
            streams = self._streams if self.keys.eval_batch_size is None else None
            # No more streams than windows.
            rows = -(-min(streams or rows * world_size, counts[0]) // world_size)
            every = EveryStream(counts[0], rows, rank=rank, world_size=world_size)
        return BatchLoader(self._batches(stage, rows), every, **self.loader_options())

    def training_sampler(self) -> MixedSampler | StreamSampler:
        place, cut = find_place(self.trainer)._asdict(), self._windows["train"]
        if self.keys.packing == "streams":
            return StreamSampler(cut[0], self.batch_size, seed=self.seed, **place)
        return MixedSampler(cut, self.batch_size, weights=self.keys.weights, seed=self.seed, **place)


def open_corpora(keys: TextDataKeys, tokenizer: Mapping[str, Any] | None = None) -> list[TokenStore]:
    """One corpus for each entry of `data.root`, or the only one; files have by default a model's `tokenizer`."""
    if keys.source == "standard_library":
        parts = list(group_files(standard_library_files(), format="python"))
        return [_prepared(keys.source, parts, TEXT, keys, "bytes")]
    roots = [keys.root] if isinstance(keys.root, str) else keys.root or []
    if keys.source == "tokens":
        return [open_store(root, check=keys.check) for root in roots]
    columns = Columns(keys.column or TEXT.text, keys.prompt_column)
    # Not how the model begins and ends a text: it is trained on documents between separators.
    own = {name: value for name, value in (tokenizer or {}).items() if name in ("kind", "separator", "json")}
    if keys.separator is not None and "json" in own:
        own["separator"] = keys.separator
    choice: str | Mapping[str, Any] = keys.tokenizer or own or "bytes"
    stores = []
    for root in roots:
        path = root if root.startswith(STREAM) else os.path.realpath(root)
        stores.append(_prepared(Path(root).resolve().stem, find_parts([path], columns), columns, keys, choice))
    return stores


def fractions_of(keys: TextDataKeys) -> dict[str, float]:
    """The shares of validation and test, for text that is not prepared yet."""
    shares = {"validation": keys.validation, "test": keys.test}
    return {split: _FRACTION if share is None else share for split, share in shares.items()}


def _prepared(
    name: str, parts: Sequence[Part], columns: Columns, keys: TextDataKeys, tokenizer: str | Mapping[str, Any]
) -> TokenStore:
    """The tokens of text, prepared unless the cache has them."""
    how: Any = {"columns": columns, "tokenizer": tokenizer, "separator": keys.separator}
    how["fractions"] = fractions_of(keys)

    def write(folder: Path) -> None:
        manifest = prepare(parts, folder, **how)
        if manifest["malformed"]:
            _log.warning("%s: %s", name, describe(manifest))

    return open_store(in_cache(name, plan_of(parts, **how), keys.cache, MANIFEST, write), check=keys.check)
