"""Windows hold each token once, predict it from its own document alone, and have one shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from corpora import SEPARATOR, make_corpus

from longseq.tasks.text.store import Corpus
from longseq.tasks.text.windows import (
    IGNORED,
    Concatenated,
    Documents,
    EveryStream,
    EveryWindow,
    MixedSampler,
    StreamSampler,
    TokenBatch,
    WindowBatches,
    Windows,
)

LENGTHS = [5, 2, 11, 1, 7, 2, 2, 30, 3]


def batches(cut: list[Windows], sampler: object, rows: int, **options: bool) -> Iterator[TokenBatch]:
    chosen = {"reset_state": True, "carries": False, **options}
    data = WindowBatches(cut, rows, separator=SEPARATOR, **chosen)
    for indices in sampler:  # type: ignore[attr-defined]
        inputs, targets, failures = data[indices]
        assert not failures
        yield inputs, targets


def sequences(batch: TokenBatch) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens and targets of each sequence that is asked something."""
    inputs, targets = batch
    assert inputs.cu_seqlens is not None
    borders = inputs.cu_seqlens.tolist()
    for start, stop in pairwise(borders):
        if (targets[0, start:stop] != IGNORED).any():
            yield inputs.tokens[0, start:stop].tolist(), targets[0, start:stop].tolist()


def successors(corpus: Corpus) -> dict[int, int]:
    """The token that follows each token of a corpus, whose tokens are all different."""
    pairs = {}
    for start, stop in pairwise(corpus.offsets):
        document = [*corpus.tokens[start:stop].tolist(), SEPARATOR]
        pairs |= dict(pairwise(document[1:]))
    return pairs


def cut(kind: str, corpus: Corpus, length: int) -> Windows:
    return Documents(corpus, length) if kind == "documents" else Concatenated(corpus, length, whole=False)


@pytest.mark.parametrize("kind", ["concatenated", "documents"])
@pytest.mark.parametrize("length", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_token_is_predicted_once_from_its_own_document(kind: str, length: int, world_size: int) -> None:
    corpus = make_corpus(LENGTHS)
    windows, rows = cut(kind, corpus, length), 3
    after, found, units, counted, shapes = successors(corpus), Counter[int](), 0, 0, set()
    for rank in range(world_size):
        for batch in batches([windows], EveryWindow([windows.count], rows, rank=rank, world_size=world_size), rows):
            inputs, targets = batch
            assert inputs.units == int((targets != IGNORED).sum())
            units, counted = units + inputs.units, counted + inputs.byte_count
            shapes.add((inputs.tokens.shape, targets.shape, inputs.cu_seqlens.shape))  # type: ignore[union-attr]
            for tokens, wanted in sequences(batch):
                assert SEPARATOR not in tokens[1:]
                assert len(tokens) <= inputs.max_seqlen
                found.update(wanted)
                assert all(after[token] == target for token, target in zip(tokens, wanted, strict=True) if token)
    assert found == Counter({token: 1 for token in corpus.tokens.tolist() if token} | {SEPARATOR: len(LENGTHS)})
    assert (units, counted) == (sum(LENGTHS), 2 * sum(LENGTHS))
    assert len(shapes) == 1


def test_prompts_are_read_and_not_asked() -> None:
    corpus = make_corpus([6, 4], prompts=[2, 3])
    (batch,) = batches([Concatenated(corpus, 5, whole=False)], EveryWindow([2], 2), 2)
    inputs, targets = batch
    # Document 1 is 0 2 3 4 5 6, where 2 and 3 are its prompt; document 2 is 0 8 9 10, where its answer is empty.
    assert inputs.tokens.tolist() == [[0, 2, 3, 4, 5, 6, 0, 8, 9, 10]]
    assert targets.tolist() == [[IGNORED, IGNORED, 4, 5, 6, 0, IGNORED, IGNORED, IGNORED, 0]]
    assert (inputs.units, inputs.byte_count) == (5, 2 * 5)


def test_rows_without_resets_go_across_documents() -> None:
    corpus = make_corpus(LENGTHS)
    windows = Concatenated(corpus, 7, whole=True)
    ring = np.append(corpus.tokens, corpus.tokens[:8]).astype(int)
    for inputs, targets in batches([windows], MixedSampler([windows], 2, seed=3), 2, reset_state=False):
        assert inputs.cu_seqlens is None
        for tokens, wanted in zip(inputs.tokens.tolist(), targets.tolist(), strict=True):
            assert any(tokens == ring[i : i + 7].tolist() and wanted == ring[i + 1 : i + 8].tolist() for i in range(63))


@pytest.mark.parametrize("parts", [{"accumulate": 4}, {"world_size": 2, "accumulate": 2}, {"world_size": 4}])
def test_batches_are_dealt_out_as_one_process_sees_them(parts: dict[str, int]) -> None:
    corpora = [make_corpus([9] * 20), make_corpus([5] * 11)]
    windows: list[Windows] = [Concatenated(corpus, 4, whole=True) for corpus in corpora]
    world_size = parts.get("world_size", 1)
    for epoch in (0, 1):
        whole = MixedSampler(windows, 8, weights=[1, 2], seed=5)
        whole.set_epoch(epoch)
        dealt = [MixedSampler(windows, 2, weights=[1, 2], seed=5, rank=rank, **parts) for rank in range(world_size)]
        for sampler in dealt:
            sampler.set_epoch(epoch)
        updates = [[] for _ in range(whole.updates)]  # type: ignore[var-annotated]
        for sampler in dealt:
            for number, batch in enumerate(sampler):
                updates[number // parts.get("accumulate", 1)] += batch
        assert [sorted(update) for update in updates] == [sorted(batch) for batch in whole]


def test_weights_hold_over_epochs_and_each_pass_is_whole() -> None:
    corpora = [make_corpus([9] * 20), make_corpus([5] * 11)]
    windows: list[Windows] = [Concatenated(corpus, 4, whole=True) for corpus in corpora]
    sampler = MixedSampler(windows, 1, weights=[1, 2], seed=5)
    seen: list[list[int]] = [[], []]
    for epoch in range(6):
        sampler.set_epoch(epoch)
        drawn = sorted((one.corpus, one.window, one.shift) for batch in sampler for one in batch)
        counts = Counter(corpus for corpus, _, _ in drawn)
        assert counts == {0: 19, 1: 39}
        for corpus, window, _ in drawn:
            seen[corpus].append(window)
    for windows_of, found in zip(windows, seen, strict=True):
        passes = len(found) / windows_of.count
        assert all(int(passes) <= times <= passes + 1 for times in Counter(found).values())
        assert len(set(found)) == windows_of.count


def test_streams_go_on_where_the_batch_before_ended() -> None:
    corpus = make_corpus([9] * 20)
    windows = Concatenated(corpus, 4, whole=True)
    ring = [*corpus.tokens.tolist(), *corpus.tokens[:100].tolist()]
    lanes: list[list[int]] = [[], [], []]
    for number, batch in enumerate(batches([windows], StreamSampler(windows, 3, seed=1), 3, carries=True)):
        inputs, _ = batch
        assert inputs.carry is not None
        borders = inputs.cu_seqlens.tolist()  # type: ignore[union-attr]
        for row, lane in enumerate(lanes):
            tokens = inputs.tokens[0, 4 * row : 4 * row + 4].tolist()
            lane += tokens
            assert bool(inputs.carry.fresh[row]) == (number == 0 or tokens[0] == SEPARATOR)
            assert borders[inputs.carry.first[row]] == 4 * row  # type: ignore[index]
            assert borders[int(inputs.carry.last[row]) + 1] == 4 * row + 4  # type: ignore[index]
            assert borders[int(inputs.carry.last[row])] < 4 * row + 4  # type: ignore[index]
    assert all(len(lane) == 4 * 15 for lane in lanes)
    assert all(any(lane == ring[i : i + 60] for i in range(180)) for lane in lanes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_are_measured_whole(world_size: int) -> None:
    corpus = make_corpus([9] * 20)
    windows = Concatenated(corpus, 7, whole=False)
    found = Counter[int]()
    lengths = set()
    for rank in range(world_size):
        sampler = EveryStream(windows.count, 3, rank=rank, world_size=world_size)
        lengths.add(len(sampler))
        for _, targets in batches([windows], sampler, 3, carries=True):
            found.update(targets[targets != IGNORED].tolist())
    assert found == Counter({token: 1 for token in corpus.tokens.tolist() if token} | {SEPARATOR: 20})
    assert len(lengths) == 1


def test_what_cannot_be_trained_on_is_refused() -> None:
    windows = Concatenated(make_corpus([9] * 2), 4, whole=True)
    for sampler in (MixedSampler, StreamSampler):
        with pytest.raises(ValueError, match="an update needs 5 windows of 4 tokens, and there are 4"):
            sampler([windows] if sampler is MixedSampler else windows, 5, seed=0)  # type: ignore[arg-type]
    short = Concatenated(make_corpus([3]), 4, whole=True)
    with pytest.raises(ValueError, match="a corpus of 3 tokens has no window of 4"):
        MixedSampler([windows, short], 1, weights=[1, 1], seed=0)
    assert len(list(MixedSampler([windows, short], 1, seed=0))) == 4
    with pytest.raises(ValueError, match="accumulates no batches, not 2"):
        StreamSampler(windows, 1, seed=0, accumulate=2)
