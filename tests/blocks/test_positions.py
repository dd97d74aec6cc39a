import pytest
import torch
from torch.nn import functional

from longseq.blocks.positions import TOKEN_PLACES, insert_prefix, layout_of, resize_positions, split_prefix


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


def test_without_a_token_the_sequence_is_the_patches():
    patches = torch.randn(2, 15, 4)
    token, remaining = split_prefix(patches, layout_of(3, 5, "none"))
    assert token is None
    assert remaining is patches


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match=r"class_token='last' .* middle, first, none"):
        layout_of(2, 2, "last")
    assert set(TOKEN_PLACES) == {"middle", "first", "none"}


def test_resizing_interpolates_the_grid():
    table = torch.randn(1, 14 * 14, 8)
    image = table.reshape(1, 14, 14, 8).permute(0, 3, 1, 2)
    expected = functional.interpolate(image, size=(24, 20), mode="bicubic", antialias=True)
    resized = resize_positions(table, (14, 14), (24, 20))
    assert torch.equal(resized, expected.permute(0, 2, 3, 1).reshape(1, 24 * 20, 8))


def test_resizing_keeps_the_order_of_the_cells():
    rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    table = torch.stack([rows, columns], dim=-1).reshape(1, 196, 2)
    resized = resize_positions(table, (14, 14), (24, 24)).reshape(24, 24, 2)
    assert (resized[:, :, 0].diff(dim=0) > 0).all()
    assert (resized[:, :, 1].diff(dim=1) > 0).all()
    assert resized[:, :, 0].diff(dim=1).abs().max() < 1e-4


def test_the_same_grid_leaves_the_table_alone():
    table = torch.randn(1, 12, 8)
    assert torch.equal(resize_positions(table, (3, 4), (3, 4)), table)
    assert not torch.equal(resize_positions(table, (3, 4), (4, 3)), table)
