"""Many cases in one test: all of them run, and the error names those that failed."""

from __future__ import annotations

import pytest
from cases import cases


def test_the_error_names_each_case_that_failed() -> None:
    seen = []

    @cases(("width", "name"), [(1, "one"), (2, "two"), (3, "three")])
    def check(folder: str, width: int, name: str) -> None:
        seen.append((folder, width))
        if width == 2:
            pytest.fail("refused")
        assert width != 3, f"no {name}"

    with pytest.raises(AssertionError) as caught:
        check(folder="here")
    assert seen == [("here", 1), ("here", 2), ("here", 3)]
    told = str(caught.value).splitlines()
    assert told[0] == "2 of 3 cases failed:"
    assert told[1] == "width=2, name=two: Failed: refused"
    assert told[2].startswith("width=3, name=three: AssertionError: no three")
    assert caught.value.__cause__ is not None


def test_cases_may_follow_from_other_arguments() -> None:
    seen = []

    @cases("part", lambda whole: range(whole))
    @cases("sign", "+-")
    def check(whole: int, part: int, sign: str) -> None:
        seen.append(sign + str(part))

    check(whole=2)
    assert seen == ["+0", "-0", "+1", "-1"]
    with pytest.raises(AssertionError, match="tests nothing"):
        check(whole=0)


def test_a_case_that_skips_skips_the_test() -> None:
    @cases("number", [1, 2])
    def check(number: int) -> None:
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception):
        check()
