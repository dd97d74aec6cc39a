import pytest
import torch
from torch.nn import functional

from longseq.blocks.positions import insert_prefix, layout_of, resize_positions, split_prefix


@pytest.mark.parametrize(("place", "index"), [("middle", 7), ("first", 0), ("none", None)])
def test_the_token_stands_where_its_place_says(place, index):
    layout = layout_of(3, 5, place)
    assert layout[:3] == (3, 5, index)
    if index is None:
        return
    patches, token = torch.randn(2, 15, 4), torch.randn(1, 1, 4)
    sequence = insert_prefix(patches, token, layout)
    assert sequence.shape == (2, 16, 4)
    assert torch.equal(sequence[:, index], token[0].expand(2, -1))
    taken, remaining = split_prefix(sequence, layout)
    assert torch.equal(taken, token.expand(2, -1, -1))
    assert torch.equal(remaining, patches)


def test_resizing_interpolates_the_grid():
    table = torch.randn(1, 14 * 14, 8)
    image = table.reshape(1, 14, 14, 8).permute(0, 3, 1, 2)
    expected = functional.interpolate(image, size=(24, 20), mode="bicubic", antialias=True)
    resized = resize_positions(table, (14, 14), (24, 20))
    assert torch.equal(resized, expected.permute(0, 2, 3, 1).reshape(1, 24 * 20, 8))


def test_the_same_grid_leaves_the_table_alone():
    table = torch.randn(1, 12, 8)
    assert torch.equal(resize_positions(table, (3, 4), (3, 4)), table)
    assert not torch.equal(resize_positions(table, (3, 4), (4, 3)), table)
