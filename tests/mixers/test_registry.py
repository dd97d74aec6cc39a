"""Mixers by name, and the messages for a wrong name or option."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.linear_attention import LinearAttention


def test_unknown_name_lists_the_names_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown mixer 'longhron': did you mean 'longhorn'\?.*deltanet"):
        mixers.create("longhron", 32)


def test_unknown_option_lists_the_options() -> None:
    with pytest.raises(ValueError, match="'mamba' has no option heads; its options are expand, state_size"):
        mixers.create("mamba", 32, heads=4)


def test_text_is_no_number() -> None:
    refused: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (LinearAttention, {"d_model": 32, "num_heads": "4"}, "num_heads='4' must be a whole number"),
        (LinearAttention, {"d_model": "32"}, "d_model='32' must be a whole number"),
        (partial(mixers.create, "lattice", 32), {"sparsity": "1"}, "sparsity='1' must be a number"),
        (TokenBackbone, {"vocab_size": 8, "d_model": 32, "depth": "4"}, "depth='4' must be a whole number"),
    )
    for make, given, kind in refused:
        with pytest.raises(ValueError, match=f"^{kind}, and is text$"):
            make(**given)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'mamba' is taken by Mamba"):
        mixers.register("mamba")(mixers.get("longhorn"))


@pytest.mark.parametrize(
    ("inert_with", "message"),
    [
        *(
            ({"eps": cases}, r"Own\.inert_with\['eps'\] must be a tuple of cases")
            for cases in (("normalizer", (False,)), {"normalizer": (False,)}, ({"normalizer": False},))
        ),
        (({"eps": ({"normalizer": (False,)},)},), r"Own\.inert_with must be a mapping of options to cases, as \{"),
        (None, r"Own\.inert_with must be a mapping of options to cases, as \{"),
    ],
)
def test_cases_of_options_without_effect_that_have_another_form_are_refused(inert_with: object, message: str) -> None:
    own = type("Own", (mixers.get("linear_attention"),), {"inert_with": inert_with})
    with pytest.raises(ValueError, match=message):
        mixers.register("own")(own)
    assert "own" not in mixers.mixer_names()


@pytest.mark.parametrize(
    ("inert_with", "wrong"),
    [({"epsilon": ({"normalizer": (False,)},)}, "epsilon"), ({"eps": ({"normaliser": (False,)},)}, "normaliser")],
)
def test_cases_of_options_that_a_mixer_does_not_have_are_refused(inert_with: object, wrong: str) -> None:
    own = type("Own", (mixers.get("linear_attention"),), {"inert_with": inert_with})
    with pytest.raises(ValueError, match=f"names '{wrong}', which is none of the options: .*normalizer"):
        mixers.register("own")(own)
    assert "own" not in mixers.mixer_names()


def test_a_mixer_inherits_cases_of_options_that_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longseq.mixers.registry._REGISTRY", {})

    class Plain(LinearAttention):
        def __init__(self, d_model: int, *, num_heads: int = 1) -> None:
            super().__init__(d_model, num_heads=num_heads, normalizer=False)

    assert mixers.register("plain")(Plain).inert_with


@pytest.mark.slow
def test_options_that_no_configuration_could_hold_are_refused() -> None:
    class Placed(LinearAttention):
        def __init__(self, d_model: int, size: int = 4, *, backend: str = "auto") -> None:
            super().__init__(d_model, backend=backend)

    class Required(LinearAttention):
        def __init__(self, d_model: int, *, size: int, backend: str = "auto") -> None:
            super().__init__(d_model, backend=backend)

    class Unspoken(LinearAttention):
        def __init__(self, d_model: int, *, map: object = len, backend: str = "auto") -> None:
            super().__init__(d_model, backend=backend)

    class Nested(LinearAttention):
        def __init__(self, d_model: int, *, maps: object = (1, len), backend: str = "auto") -> None:
            super().__init__(d_model, backend=backend)

    class Empty(LinearAttention):
        def __init__(self) -> None:
            super().__init__(8)

    for own, message in (
        (Nested, r"Nested: the option maps has the default \(1, <built-in function len>\): give"),
        (Empty, r"Empty\.__init__ has no parameter d_model: put it first$"),
        (Unspoken, "Unspoken: the option map has the default <built-in function len>: give a number, text, a list"),
        (Placed, r"Placed: the option size must be keyword-only: put \* after d_model in __init__$"),
        (Required, "Required: the option size needs a default, such as size=1$"),
    ):
        with pytest.raises(ValueError, match=message):
            mixers.register("own")(own)
    assert "own" not in mixers.mixer_names()


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_options_that_are_not_finite_are_refused(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: tuple[tuple[str, dict[str, Any]], ...] = (
        ("deltanet", {"norm_eps": value}),
        ("retnet", {"rotary_base": value}),
        ("attention", {"rotary": True, "rotary_scaling": {"rope_type": "linear", "factor": value}}),
    )
    for name, options in refused:
        option = list(options)[-1]
        with pytest.raises(ValueError, match=f"^{option}=.* of the mixer '{name}' is not finite: give"):
            mixers.create(name, 32, **options)
    monkeypatch.setattr("longseq.mixers.registry._REGISTRY", {})

    class Limited(LinearAttention):
        def __init__(self, d_model: int, *, limit: float = float("inf"), backend: str = "auto") -> None:
            super().__init__(d_model, backend=backend)

    class Unlimited(LinearAttention):
        def __init__(self, d_model: int, *, limit: float | None = None, backend: str = "auto") -> None:
            super().__init__(d_model, backend=backend)

    for name, own in (("limited", Limited), ("unlimited", Unlimited)):  # the constructor of a plug-in decides
        mixers.register(name)(own)
        assert mixers.create(name, 32, limit=float("inf")).arguments["limit"] == float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 does not divide the width 32"),
        ({"head_dim": 7}, "head_dim=7 does not divide the width 32"),
        ({"num_heads": 2, "head_dim": 8}, "num_heads=2 times head_dim=8 is not the width 32"),
    ],
)
def test_heads_that_do_not_fit_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixers.create("deltanet", 32, **options)


@pytest.mark.parametrize(("width", "heads", "dim"), [(192, 3, 64), (256, 2, 128), (96, 3, 32), (30, 15, 2)])
def test_heads_are_chosen_for_every_width(width: int, heads: int, dim: int) -> None:
    mixer = mixers.create("deltanet", width)
    assert (mixer.num_heads, mixer.head_dim) == (heads, dim)


@pytest.mark.parametrize("name", mixers.mixer_names())
def test_every_mixer_names_its_source(name: str) -> None:
    mixer = mixers.get(name)
    assert mixer.paper
    assert "Source:" in (mixer.__doc__ or "")
