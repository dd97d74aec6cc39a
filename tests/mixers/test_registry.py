"""Mixers by name, and the messages for a wrong name or option."""

from __future__ import annotations

import pytest

from longseq import mixers


def test_unknown_name_lists_the_names_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown mixer 'longhron': did you mean 'longhorn'\?"):
        mixers.create("longhron", 32)


def test_unknown_option_lists_the_options() -> None:
    with pytest.raises(ValueError, match="'mamba' has no option heads; its options are "):
        mixers.create("mamba", 32, heads=4)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'mamba' is taken by Mamba"):
        mixers.register("mamba")(mixers.get("longhorn"))


@pytest.mark.parametrize(("width", "heads", "dim"), [(192, 3, 64), (256, 2, 128), (96, 3, 32), (30, 15, 2)])
def test_heads_are_chosen_for_every_width(width: int, heads: int, dim: int) -> None:
    mixer = mixers.create("deltanet", width)
    assert (mixer.num_heads, mixer.head_dim) == (heads, dim)


@pytest.mark.parametrize("name", mixers.mixer_names())
def test_every_mixer_names_its_source(name: str) -> None:
    mixer = mixers.get(name)
    assert mixer.paper
    assert "Source:" in (mixer.__doc__ or "")
