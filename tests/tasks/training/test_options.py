"""Keys are checked by types and ranges: one line for each mistake, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from longseq.tasks.training.options import Length, OneOf, Range, Required, check_call, check_value, read


@dataclass(frozen=True, kw_only=True)
class Inner:
    power: Annotated[float, Range(above=0)] = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    checkpoint: Annotated[str | None, Required("give checkpoint=FILE")] = None
    size: Annotated[int, Range(1, 512)]
    share: Annotated[float, Range(0, below=1)] = 0.1
    flag: bool = False
    mode: Literal["skip", "raise"] = "skip"
    name: str | None = None
    rate: Annotated[float | None, Range(above=0)] = None
    sizes: Annotated[list[int], Range(1), Length(1)] = field(default_factory=lambda: [1])
    pair: tuple[int, int] = (1, 2)
    kernel: Annotated[str, OneOf(lambda: ["torch", "triton"])] = "torch"
    inner: Inner = field(default_factory=Inner)
    slices: Sequence[Inner] = ()
    anything: Any = None
    table: Mapping[str, int] = field(default_factory=dict)


GOOD: dict[str, Any] = {"checkpoint": "last.ckpt", "size": 8}


def test_values_become_a_dataclass_and_numbers_floats():
    given = {**GOOD, "share": 0, "sizes": [1, 2], "pair": [3, 4], "inner": {"power": 2}, "slices": [{"power": 3}]}
    outer = read(Outer, given, "data")
    assert (outer.share, type(outer.share), outer.pair, outer.sizes) == (0.0, float, (3, 4), [1, 2])
    assert outer.inner == Inner(power=2.0)
    assert outer.slices == [Inner(power=3.0)]
    assert outer.mode == "skip"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sise": 3}, "data.sise is unknown: did you mean data.size? the keys of data are checkpoint, size"),
        ({"size": -3}, "data.size=-3 must be a whole number from 1 to 512"),
        ({"size": 3.0}, "data.size=3.0 must be a whole number from 1 to 512"),
        ({"size": True}, "data.size=true must be a whole number from 1 to 512"),
        ({"size": "8"}, "data.size=8 must be a whole number from 1 to 512"),
        ({"size": None}, "data.size=null must be a whole number from 1 to 512"),
        ({"share": float("nan")}, "data.share=nan must be a number of at least 0 and below 1"),
        ({"share": 1}, "data.share=1 must be a number of at least 0 and below 1"),
        ({"rate": float("inf")}, "data.rate=inf must be a number above 0 or null"),
        ({"rate": 0}, "data.rate=0 must be a number above 0 or null"),
        ({"rate": "0.5"}, "data.rate=0.5 must be a number above 0 or null, and is text: give it without quotes, and a"),
        ({"flag": "yes"}, "data.flag=yes must be true or false"),
        ({"flag": 1}, "data.flag=1 must be true or false"),
        ({"mode": "skipp"}, "data.mode=skipp must be one of skip, raise; did you mean skip?"),
        ({"name": 3}, "data.name=3 must be text or null"),
        ({"sizes": "1,2"}, "data.sizes=1,2 must be a list of at least 1, each entry a whole number of at least 1"),
        ({"sizes": []}, "data.sizes=[] must be a list of at least 1, each entry a whole number of at least 1"),
        ({"sizes": [1, 0]}, "data.sizes=[1, 0] must be a list of at least 1, each entry a whole number of at least 1"),
        ({"pair": [1]}, "data.pair=[1] must be a list of 2: a whole number, a whole number"),
        ({"kernel": "tritn"}, "data.kernel=tritn must be one of torch, triton; did you mean triton?"),
        ({"inner": 3}, "data.inner=3 must be a dictionary of its keys: power"),
        ({"inner": {"power": 0}}, "data.inner.power=0 must be a number above 0"),
        ({"inner": {"powr": 1}}, "data.inner.powr is unknown: did you mean data.inner.power?"),
        ({"slices": [{"power": 1}, {"power": -1}]}, "data.slices[1].power=-1 must be a number above 0"),
        ({"slices": {"power": 1}}, "data.slices={'power': 1} must be a list, each entry a dictionary of power"),
        ({"table": {"a": "b"}}, "data.table.a=b must be a whole number"),
        ({"checkpoint": None}, "give checkpoint=FILE"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(Outer, {**GOOD, **given}, "data")
    assert "\n" not in str(caught.value)


def test_a_key_without_a_default_must_be_there():
    with pytest.raises(ValueError, match=r"^size is missing: give size="):
        read(Outer, {"checkpoint": "last.ckpt"})
    with pytest.raises(ValueError, match=r"data=\[1\] must be a dictionary"):
        read(Outer, [1], "data")


def test_a_long_value_is_cut_and_stays_one_line():
    with pytest.raises(ValueError, match=r"^mode=a b+\.\.\. must be") as caught:
        check_value(Literal["skip"], "a\n" + 5000 * "b", "mode")
    assert len(str(caught.value)) < 200


def call(given: int, *, width: int = 4, scale: float = 1.0, heads: int | None = None, other: object = None) -> None: ...


def test_options_of_a_function_are_checked_against_its_signature():
    assert check_call(call, {"width": 3, "scale": 2}, "mixer.options", given=["given"]) == {"width": 3, "scale": 2.0}
    assert check_call(call, {"other": 3}, "mixer.options", given=["given"]) == {"other": 3}
    for options, message in (
        ({"widht": 3}, r"mixer\.options\.widht is unknown: did you mean mixer\.options\.width\?"),
        ({"given": 3}, r"mixer\.options\.given is unknown"),
        ({"width": 3.5}, r"mixer\.options\.width=3\.5 must be a whole number"),
        ({"heads": "four"}, r"mixer\.options\.heads=four must be a whole number or null"),
    ):
        with pytest.raises(ValueError, match=message):
            check_call(call, options, "mixer.options", given=["given"])
    with pytest.raises(ValueError, match=r"place\.given is missing"):
        check_call(call, {}, "place")
