import pytest
import torch

from longseq.blocks.positions import TOKEN_PLACES, layout_of
from longseq.blocks.reading import reading_orders, reorder, restore


@pytest.mark.parametrize(
    ("order", "place", "expected"),
    [
        ("forward", "none", [0, 1, 2, 3, 4, 5]),
        ("backward", "none", [5, 4, 3, 2, 1, 0]),
        ("columns", "none", [0, 3, 1, 4, 2, 5]),
        ("columns_backward", "none", [5, 2, 4, 1, 3, 0]),
        ("columns", "middle", [0, 3, 1, -1, 4, 2, 5]),
        ("columns_backward", "middle", [5, 2, 4, -1, 1, 3, 0]),
        ("columns", "first", [-1, 0, 3, 1, 4, 2, 5]),
    ],
)
def test_an_order_reads_the_grid_as_named(order, place, expected):
    layout = layout_of(2, 3, place)
    patches = list(range(6))
    if layout.token is not None:
        patches.insert(layout.token, -1)
    read = reorder(torch.tensor([patches]), order, layout)
    assert read.tolist() == [expected]


@pytest.mark.parametrize("place", TOKEN_PLACES)
@pytest.mark.parametrize("order", reading_orders("cross"))
def test_restore_undoes_reorder(order, place):
    layout = layout_of(3, 5, place)
    x = torch.randn(2, 15 + (layout.token is not None), 4)
    assert torch.equal(restore(reorder(x, order, layout), order, layout), x)
