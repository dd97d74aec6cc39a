"""`SampleData`: data sets of single samples, as batches for any number of processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from longseq.tasks import Info, Keys, SampleData, key


class SquaresKeys(Keys):
    name: str = key("squares", "the name in tables")
    sizes: list[int] = key(..., "the samples of each split")
    eval_batch_size: int | None = key(None, "samples at a time")
    num_workers: int = key(0, "processes")


class Squares(SampleData):
    keys_class, info_class = SquaresKeys, Info

    def open(self):
        numbers = (torch.arange(size) for size in self.keys.sizes)
        return {split: TensorDataset(n, n**2) for split, n in zip(("train", "val", "test"), numbers, strict=True)}

    @property
    def info(self):
        raise NotImplementedError


def squares(rank=0, world_size=1, **keys):
    data = Squares(SquaresKeys(**keys), batch_size=4)
    data.setup()
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, accumulate_grad_batches=1)
    return data


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_epoch_has_each_sample_once_in_an_order_of_its_own(workers):
    data = Squares(SquaresKeys(sizes=[12, 1, 1], num_workers=workers), batch_size=4)
    data.setup()
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches = list(loader)
        assert all(torch.equal(numbers**2, targets) for numbers, targets in batches)
        epochs.append([number for numbers, _ in batches for number in numbers.tolist()])
    assert data.batches_per_epoch == 3
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))


def test_processes_evaluate_each_sample_once_and_as_many_batches():
    parts = [list(squares(rank, 3, sizes=[4, 7, 2], eval_batch_size=2).val_dataloader()) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert sorted(number for part in parts for numbers, _ in part for number in numbers.tolist()) == list(range(7))
    (empty,) = squares(2, 3, sizes=[4, 7, 2]).test_dataloader()
    assert [(len(tensor), tensor.dtype) for tensor in empty] == [(0, torch.int64)] * 2


@pytest.mark.slow
def test_predictions_are_of_the_test_samples_in_their_order():
    for processes in (1, 3):
        parts = [squares(rank, processes, sizes=[4, 1, 17]).predict_dataloader() for rank in range(processes)]
        batches = [numbers for together in zip(*parts, strict=True) for numbers, _ in together]
        assert len(batches) > 4
        assert torch.cat(batches).tolist() == list(range(17))
    measured = torch.cat([numbers for numbers, _ in squares(sizes=[4, 1, 17]).test_dataloader()])
    assert measured.tolist() != list(range(17)), "measured batches are mixed"
