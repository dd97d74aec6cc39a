"""What every registered mixer has: its heads and its source."""

from __future__ import annotations

import pytest

from longseq import mixers


@pytest.mark.parametrize(("width", "heads", "dim"), [(192, 3, 64), (256, 2, 128), (96, 3, 32), (30, 15, 2)])
def test_heads_are_chosen_for_every_width(width: int, heads: int, dim: int) -> None:
    mixer = mixers.create("deltanet", width)
    assert (mixer.num_heads, mixer.head_dim) == (heads, dim)


@pytest.mark.parametrize("name", mixers.mixer_names())
def test_every_mixer_names_its_source(name: str) -> None:
    mixer = mixers.get(name)
    assert mixer.paper
    assert "Source:" in (mixer.__doc__ or "")
