"""Batches that travel as one tensor."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from longseq.tasks.data.batch import Batch, Failure
from longseq.tasks.data.loader import BatchLoader
from longseq.tasks.data.parcel import Parcel, pack, unpack


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
    parcel = pack((tensors, sizes, torch.eye(3).to_sparse(), rest))
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
    def __getitem__(self, number: int) -> Batch:
        return Batch(torch.full((3,), number), torch.tensor([number]), [Failure(str(number), "lost")])

    def __len__(self) -> int:
        return 4


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
