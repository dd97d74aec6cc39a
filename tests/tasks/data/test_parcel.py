"""Batches that travel as one tensor."""

import gc
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from longseq.tasks.data import parcel as parcels
from longseq.tasks.data.batch import Batch, Failure
from longseq.tasks.data.loader import BatchLoader
from longseq.tasks.data.parcel import Packer, Parcel, unpack


class Sizes(NamedTuple):
    names: list[str]
    numbers: Tensor


def test_a_value_comes_back_as_it_was() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "strided": torch.randn(4, 6, generator=generator, dtype=torch.float64).t()[1:],
        "bit": torch.tensor(True),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "none": torch.empty(0, 3, dtype=torch.int32),
    }
    sizes = Sizes(["a", "b"], torch.randint(9, (3, 5), generator=generator, dtype=torch.int16))
    rest = [1, (2.5, None), {"x": b"y"}]
    receive, arguments = Packer()((tensors, sizes, torch.eye(3).to_sparse(), rest)).__reduce__()
    parcel = receive(*arguments)
    found, found_sizes, sparse, found_rest = unpack(parcel)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert type(found_sizes) is Sizes
    assert found_sizes.names == sizes.names
    assert torch.equal(found_sizes.numbers, sizes.numbers)
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert found_rest == rest
    start = parcel.memory.data_ptr()
    assert start <= found["strided"].data_ptr() < start + parcel.memory.nbytes  # a view, not a copy


class Counted(Dataset[Batch]):
    """Batch n holds n, as many times as `lengths` says in turn."""

    def __init__(self, count: int = 4, lengths: tuple[int, ...] = (3,)) -> None:
        self.count, self.lengths = count, lengths

    def __getitem__(self, number: int) -> Batch:
        values = torch.full((self.lengths[number % len(self.lengths)],), number)
        return Batch(values, torch.tensor([number]), [Failure(str(number), "lost")])

    def __len__(self) -> int:
        return self.count


def open_loader(dataset: Counted, num_workers: int = 1) -> BatchLoader:
    def ignore(failures: list[Failure]) -> None:
        pass

    return BatchLoader(dataset, None, num_workers=num_workers, report=ignore, finish=lambda batches: iter(batches))


def is_batch(number: int, batch: tuple[Tensor, Tensor], length: int = 3) -> bool:
    return batch[0].tolist() == [number] * length and batch[1].tolist() == [number]


def test_a_worker_sends_one_tensor_for_a_batch_that_is_finished_afterwards() -> None:
    reported: list[Failure] = []
    loader = BatchLoader(Counted(), None, num_workers=1, report=reported.extend, finish=lambda batches: iter(batches))
    assert all(type(sent) is Parcel for sent in DataLoader.__iter__(loader))
    batches = list(loader)
    assert [inputs.tolist() for inputs, _ in batches] == [[number] * 3 for number in range(4)]
    assert [targets.tolist() for _, targets in batches] == [[number] for number in range(4)]
    assert [failure.path for failure in reported] == ["0", "1", "2", "3"]


@pytest.mark.gpu
def test_a_worker_sends_one_tensor_for_a_batch_that_is_pinned() -> None:
    loader = BatchLoader(Counted(), None, num_workers=1, pin_memory=True, report=[].extend)
    assert all(type(sent) is Parcel for sent in DataLoader.__iter__(loader))
    for number, (inputs, targets) in enumerate(loader):
        assert inputs.is_pinned()
        assert inputs.to("cuda", non_blocking=True).tolist() == [number] * 3
        assert targets.to("cuda", non_blocking=True).tolist() == [number]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_fills_the_memory_of_batches_that_are_gone(num_workers: int) -> None:
    places = set()
    for number, batch in enumerate(open_loader(Counted(40), num_workers)):
        assert is_batch(number, batch)
        places.add(batch[0].data_ptr())
    assert len(places) <= 4 * num_workers


def test_batches_that_are_kept_stay_as_they_are() -> None:
    loader = open_loader(Counted(30))
    kept = list(loader)
    assert all(is_batch(number, batch) for number, batch in enumerate(kept))
    assert all(is_batch(number, batch) for number, batch in enumerate(loader))  # another epoch of the same worker
    assert all(is_batch(number, batch) for number, batch in enumerate(kept))


def test_a_view_of_one_tensor_keeps_a_batch() -> None:
    kept: list[Tensor] = []
    for number, (inputs, targets) in enumerate(open_loader(Counted(30))):
        if number % 7 == 0:
            kept.append((inputs[1:], targets.view(1, 1))[number % 2])
        del inputs, targets
    assert [view.flatten()[0].item() for view in kept] == [0, 7, 14, 21, 28]


def test_batches_of_growing_and_shrinking_lengths() -> None:
    lengths = (1, 5_000, 7, 20_000, 0, 80_000, 300)
    for number, batch in enumerate(open_loader(Counted(42, lengths))):
        assert is_batch(number, batch, lengths[number % len(lengths)])


def received() -> Iterator[int]:
    return (worker for worker, _ in parcels._received)


def test_no_more_memory_is_kept_than_batches_are_under_way_and_that_of_ended_workers_is_not() -> None:
    first, second = open_loader(Counted(42, tuple(range(1, 400_000, 10_000)))), open_loader(Counted())
    count = sum(1 for _ in first)
    assert count == 42
    workers = set(received())
    assert len([worker for worker in received() if worker == max(workers)]) <= 4
    del first
    gc.collect()
    time.sleep(0.1)
    list(second)
    assert not workers & set(received())


def test_a_forked_process_that_drops_a_batch_does_not_give_its_memory_back() -> None:
    batches = iter(open_loader(Counted(30)))
    held = next(batches)
    if not (child := os.fork()):
        del held
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    for number, batch in enumerate(batches, 1):
        assert is_batch(number, batch)
        assert is_batch(0, held)


def test_an_epoch_that_is_left_early_does_not_spoil_the_next_one() -> None:
    loader = open_loader(Counted(30))
    held = next(iter(loader))
    for _ in range(3):
        for number, batch in zip(range(5), loader, strict=False):
            assert is_batch(number, batch)
    assert is_batch(0, held)
