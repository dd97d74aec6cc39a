"""The samples of a rank: pure functions, equal over world sizes, none twice in an evaluation."""

import pytest

from longseq.tasks.data.sampler import EvaluationSampler, TrainingSampler


def test_training_draws_every_sample_at_most_once_without_repeats():
    sampler = TrainingSampler(103, 10, seed=5)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 10
    positions = [index.position for batch in batches for index in batch]
    assert len(positions) == len(set(positions)) == 100
    assert all(index.repeat == 0 for batch in batches for index in batch)


def test_epochs_and_seeds_differ_but_are_reproducible():
    sampler = TrainingSampler(64, 8, seed=5)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert [d.position for d in first[0]] != [d.position for d in second[0]]
    assert list(TrainingSampler(64, 8, seed=5)) == first
    assert list(TrainingSampler(64, 8, seed=6)) != first


def test_repeated_augmentation_keeps_the_length_of_an_epoch():
    indices = [index for batch in TrainingSampler(90, 9, seed=0, repeats=3) for index in batch]
    assert len(indices) == 90
    assert len({index.position for index in indices}) == 30
    assert len(set(indices)) == 90


@pytest.mark.parametrize("spread", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (3, 4)])
def test_an_effective_batch_is_dealt_out_to_the_same_parts_whoever_takes_them(spread):
    world_size, accumulate = spread
    parts = world_size * accumulate
    one, two = TrainingSampler(103, 24, seed=3, repeats=2), {"seed": 3, "repeats": 2}
    shares = [
        list(TrainingSampler(103, 24 // parts, rank=rank, world_size=world_size, accumulate=accumulate, **two))
        for rank in range(world_size)
    ]
    assert [len(share) for share in shares] == [4 * accumulate] * world_size, (
        "what fills no effective batch is left out"
    )
    for update, effective in enumerate(one):
        turns = range(update * accumulate, (update + 1) * accumulate)
        assert [shares[rank][turn] for turn in turns for rank in range(world_size)] == [
            effective[part::parts] for part in range(parts)
        ]


def test_start_skips_batches_without_changing_the_rest():
    sampler = TrainingSampler(64, 8, seed=1)
    whole = list(sampler)
    sampler.start = 3
    assert list(sampler) == whole[3:]
    assert len(sampler) == 8


@pytest.mark.parametrize(
    ("count", "batch_size", "world_size"), [(10, 4, 1), (103, 8, 4), (7, 3, 2), (3, 2, 5), (64, 8, 2)]
)
def test_evaluation_covers_each_sample_once_with_equal_batch_counts(count, batch_size, world_size):
    shares = [
        list(EvaluationSampler(count, batch_size, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    assert max(len(batch) for share in shares for batch in share) <= batch_size
    assert sorted(position for share in shares for batch in share for position in batch) == list(range(count))
